"""DPPO with the binary total-variation mask. Source: 2602.04879; the capped, detached weight is verl's.

    drop t if (A > 0 and π - μ > delta_high) or (A ≤ 0 and π - μ < -delta_low)
    kept:  L = -stopgrad(min(π / μ, cap)) · A · log π

π, μ are probabilities of the sampled token: the trust region is in probability, so rare tokens, whose ratios are wild,
are not clipped for moving a little.
"""

from __future__ import annotations

import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, behaviour_ratio
from omnifleet_trainer.objectives.tensors import Tokens


def dppo_tv(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """REINFORCE over the tokens inside the trust region. Dropped tokens stay in the divisor, as clipped ones do."""
    settings, a = objective.dppo, tokens.advantages
    moved = (torch.exp(tokens.current) - torch.exp(tokens.generation)).detach()
    high = (a > 0) & (moved > settings.delta_high)
    low = (a <= 0) & (moved < -settings.delta_low)
    ratio = behaviour_ratio(tokens)
    bounded = torch.where(low | high, torch.zeros_like(ratio), ratio.clamp(max=settings.cap))
    return Surrogate(-bounded * a * tokens.current, ratio, bounded, low, high)
