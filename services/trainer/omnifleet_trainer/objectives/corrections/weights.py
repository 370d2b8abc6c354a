"""Importance weights w = exp(p - g) of tokens, and their truncations (truncations.py).

p: the trainer's logprobs before the step's first update. g: the engine's. Their gap is what the engine computes
differently (same weights) and what the policy drifted (older weights); w corrects the product of both.
Source: decoupled PPO 2110.00641; NeMo RL `ClippedPGLoss`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.corrections.truncations import icepop, sequence_masked, truncated
from omnifleet_trainer.objectives.tensors import masked


@dataclass(frozen=True, slots=True)
class Weights:
    """values: what the loss is multiplied with; low, high: True where a truncation changed it. All [B, T], no gradient."""

    values: Tensor
    low: Tensor
    high: Tensor


def importance_weights(prev: Tensor, generation: Tensor, mask: Tensor, objective: ObjectiveConfig) -> Weights:
    """w of each trained token, truncated as the objective says. NaN and infinities become 0.

    Level `token`: w_t = exp(p_t - g_t). Level `sequence`: w = exp(Σ_t (p_t - g_t)) for all tokens of the sample.
    """
    gap = masked((prev - generation).detach(), mask)
    log_weight = gap.sum(-1, keepdim=True).expand_as(gap) if _of_sequences(objective) else gap
    weights = torch.nan_to_num(torch.exp(log_weight), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = objective.truncation_min, objective.truncation_max
    match objective.truncation:
        case "tis":
            return Weights(*truncated(weights, low, high))
        case "icepop":
            return Weights(*icepop(weights, low, high))
        case "seq-mask-tis":
            return Weights(*sequence_masked(weights, gap, mask, low, high))
    no = torch.zeros_like(weights, dtype=torch.bool)
    return Weights(weights, no, no)


def weight_sums(weights: Tensor, mask: Tensor, objective: ObjectiveConfig) -> tuple[float, float]:
    """Σ w and its count over trained tokens (level token) or samples (level sequence), for the update's mean.

    Source of dividing by that mean: verl's rollout-correction notes, self-normalised importance sampling.
    """
    if _of_sequences(objective):
        rows = mask.sum(-1) > 0
        per_sample = (weights * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        return float(per_sample[rows].sum()), float(rows.sum())
    return float((weights * mask).sum()), float(mask.sum())


def _of_sequences(objective: ObjectiveConfig) -> bool:
    """Whether all tokens of a sample have one weight; `seq-mask-tis` keeps plain token weights."""
    if objective.truncation == "seq-mask-tis":
        return False
    return (objective.weight_level or ("token" if objective.ratio == "token" else "sequence")) == "sequence"
