"""The media service: pictures, frames and model-ready tensors by the digest of their content.

Knows pixels, files and processors; nothing of prompts, models, rewards or weights.
"""
