"""PPO's clipped surrogate, as GRPO, DAPO and decoupled PPO use it.

    L = max(-A r, -A clip(r, 1 - low, 1 + high));  with dual clip c: min(L, -A c) where A < 0

Sources: PPO 1707.06347; GRPO 2402.03300; DAPO 2503.14476 (low ≠ high); dual clip 1912.09729; NeMo RL `ClippedPGLoss`.
GSPO is this with the sequence's ratio (gspo.py). Decoupled PPO (2110.00641) is this with old_policy = prev times
w = exp(prev - generation) (corrections/weights.py); with old_policy = generation it is PPO with the sampler as old.
"""

from __future__ import annotations

import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.gspo import policy_ratio
from omnifleet_trainer.objectives.surrogates.port import Surrogate
from omnifleet_trainer.objectives.tensors import Tokens


def clipped(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """Pessimistic of the plain and the clipped objective; the gradient vanishes where the clip is what counts."""
    ratio, a = policy_ratio(tokens, objective.ratio), tokens.advantages
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    bounded = ratio.clamp(low, high)
    loss = torch.maximum(-a * ratio, -a * bounded)
    if objective.dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * objective.dual_clip), loss)
    r = ratio.detach()
    above = (r > high) & (a > 0)
    if objective.dual_clip is not None:
        above = above | ((r > objective.dual_clip) & (a < 0))
    return Surrogate(loss, r, bounded.detach(), (r < low) & (a < 0), above)
