"""What a loss looks at. Axes: B samples, T predictions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before they are exponentiated: e^20 is finite in every dtype, and so is its gradient."""


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Trained tokens and samples of one whole optimiser update, over all micro-batches and ranks.

    weight: mean importance weight of the update, 1 unless `weight_normalisation` is on.
    """

    tokens: float
    sequences: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Logprobs of the same tokens under several weights, [B, T] each; only `current` carries a gradient.

    old: what ratios are taken to. generation: as the engine reported them. advantages, mask (1 = trains): [B, T].
    Entries where the mask is 0 are 0 in all of them: what stood there reaches no loss and no gradient.
    """

    current: Tensor
    old: Tensor
    generation: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def clean(
        cls, *, current: Tensor, old: Tensor, generation: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tokens:
        """The same with masked entries set to 0."""
        return cls(
            current=masked(current, mask),
            old=masked(old, mask),
            generation=masked(generation, mask),
            advantages=masked(advantages, mask),
            mask=mask,
        )


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is above 0, else 0 (also in place of NaN and infinities, and in the gradient)."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the last axis where mask is 1; [B, T] -> [B]; 0 for an empty row."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio, clamped to ±MAX_LOG_RATIO; beyond the clamp the gradient is 0, never NaN."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
