"""From a row of data to what is sent and what will be trained on: placed pictures, unexpanded and expanded tokens.

The room knows tokenizers and the media client. It must not import torch, nor know engines, rewards or the ledger.
"""

from omnifleet_trainer.rendering.renderer import RenderedPrompt, Renderer
from omnifleet_trainer.rendering.template import ChatTemplate, load_template

__all__ = ["ChatTemplate", "RenderedPrompt", "Renderer", "load_template"]
