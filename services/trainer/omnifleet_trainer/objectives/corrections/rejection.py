"""Rules that keep whole samples out of the loss, and out of every divisor and baseline.

With ρ_t = exp(p_t - g_t) over the n trained tokens of a sample:

    sequence (MIS)   min ≤ Π ρ_t ≤ max
    geometric        min ≤ (Π ρ_t)^(1/n) ≤ max
    k2, k3           mean ½ (log ρ_t)² ≤ max;  mean (ρ_t - log ρ_t - 1) ≤ max
    veto             min ≤ ρ_t ≤ max for every t

Sources: verl docs/algo/rollout_corr_math.md; SkyRL off_policy_correction (geometric mask, outlier veto).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnifleet.config.objective import RejectionConfig
from omnifleet_trainer.objectives.kl import kl_estimate
from omnifleet_trainer.objectives.tensors import masked, masked_mean


def accepted(prev: Tensor, generation: Tensor, mask: Tensor, rules: Sequence[RejectionConfig]) -> Tensor:
    """[B, T] logprobs and mask -> [B], 1 for samples that pass every rule; samples without trained tokens pass."""
    gap = masked((prev - generation).double(), mask)
    keep = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    for rule in rules:
        keep &= _passes(gap, mask, rule)
    return keep.to(mask.dtype)


def _passes(gap: Tensor, mask: Tensor, rule: RejectionConfig) -> Tensor:
    """[B] bool. Bounds are compared in the logarithm: a product of many ratios overflows, its logarithm does not."""
    match rule.rule:
        case "sequence":
            return _within(gap.sum(-1), rule)
        case "geometric":
            return _within(masked_mean(gap, mask), rule)
        case "veto":
            return (_within(gap, rule) | (mask <= 0)).all(-1)
        case "k2" | "k3":  # of KL(g || p): tokens are drawn from g, so x = p - g
            return masked_mean(kl_estimate(gap, rule.rule), mask) <= rule.max


def _within(log_values: Tensor, rule: RejectionConfig) -> Tensor:
    bounds = torch.tensor([rule.min, rule.max], dtype=torch.float64, device=log_values.device).log()
    return (log_values >= bounds[0]) & (log_values <= bounds[1])
