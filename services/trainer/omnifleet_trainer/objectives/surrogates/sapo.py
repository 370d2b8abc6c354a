"""SAPO. Source: Soft Adaptive Policy Optimization 2511.20347.

    L = -f(r) · A,  f(r) = (4 / τ) σ(τ (r - 1)),  τ = tau_positive where A > 0, else tau_negative

A smooth gate in place of the clip: f'(1) = 1 for every τ, and the gradient fades on both sides of 1.
"""

from __future__ import annotations

import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, nowhere, token_ratio
from omnifleet_trainer.objectives.tensors import Tokens


def sapo(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """The gated ratio; `bounded` is the gate's value."""
    ratio, a = token_ratio(tokens), tokens.advantages
    tau = torch.full_like(ratio, objective.sapo.tau_negative).masked_fill(a > 0, objective.sapo.tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return Surrogate(-gate * a, ratio.detach(), gate.detach(), nowhere(tokens), nowhere(tokens))
