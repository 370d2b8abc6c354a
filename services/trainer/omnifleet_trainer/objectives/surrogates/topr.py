"""TOPR. Source: Tapered Off-Policy REINFORCE 2503.14286.

    L = -stopgrad(α) · A · log π,  α = 1 where A ≥ 0, clip(π(y) / μ(y), 0, 1) where A < 0

π(y) / μ(y) is the ratio of whole replies, exp(Σ_t (l_t - g_t)): a bad reply that the policy has already left is not
pushed further, a good one is learnt in full however old it is. The paper tapers by the sign of the reward; A is the
reward minus its baseline.
"""

from __future__ import annotations

import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, nowhere
from omnifleet_trainer.objectives.tensors import Tokens, exp_ratio


def topr(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """REINFORCE, tapered on the negative side. `ratio` is that of the sequence."""
    gap = (tokens.current - tokens.generation).detach().sum(-1, keepdim=True).expand_as(tokens.mask)
    ratio, negative = exp_ratio(gap), tokens.advantages < 0
    weight = torch.where(negative, ratio.clamp(max=1.0), torch.ones_like(ratio))
    loss = -weight * tokens.advantages * tokens.current
    return Surrogate(loss, ratio, weight, nowhere(tokens), negative & (ratio > 1))
