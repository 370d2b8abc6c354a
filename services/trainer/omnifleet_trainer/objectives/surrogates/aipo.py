"""AIPO. Source: LlamaRL 2505.24034.

    L = -stopgrad(min(π / μ, cap)) · A · log π

One-sided: small weights stay small, large ones are capped. μ is the policy that sampled, so no further correction.
"""

from __future__ import annotations

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, behaviour_ratio, nowhere
from omnifleet_trainer.objectives.tensors import Tokens


def aipo(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """REINFORCE weighted by the capped ratio to the sampler."""
    ratio = behaviour_ratio(tokens)
    bounded = ratio.clamp(max=objective.aipo.cap)
    loss = -bounded * tokens.advantages * tokens.current
    return Surrogate(loss, ratio, bounded, nowhere(tokens), ratio > objective.aipo.cap)
