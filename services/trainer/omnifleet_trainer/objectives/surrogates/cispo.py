"""CISPO. Source: MiniMax-M1 2506.13585.

    L = -stopgrad(clip(r, 1 - low, 1 + high)) · A · log π

The clip bounds the weight, not the objective: every token keeps a gradient. (The paper leaves the lower side open:
clip_low = 1.)
"""

from __future__ import annotations

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, token_ratio
from omnifleet_trainer.objectives.tensors import Tokens


def cispo(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """REINFORCE weighted by the clipped ratio."""
    ratio = token_ratio(tokens).detach()
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    bounded = ratio.clamp(low, high)
    loss = -bounded * tokens.advantages * tokens.current
    return Surrogate(loss, ratio, bounded, ratio < low, ratio > high)
