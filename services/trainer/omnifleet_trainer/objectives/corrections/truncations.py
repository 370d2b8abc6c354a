"""Bounds on importance weights. Each takes and gives [B, T]: weights, and where they were too low and too high."""

from __future__ import annotations

import torch
from torch import Tensor

from omnifleet_trainer.objectives.tensors import masked_mean

Bounded = tuple[Tensor, Tensor, Tensor]


def truncated(weights: Tensor, low: float, high: float) -> Bounded:
    """TIS: w ← clip(w, low, high), of tokens or of sequences. Source: Espeholt 1802.01561; verl, NeMo RL."""
    return weights.clamp(low, high), weights < low, weights > high


def icepop(weights: Tensor, low: float, high: float) -> Bounded:
    """IcePop: w ← w inside [low, high], 0 outside. Source: Ling-Team, "Small leak can sink a great ship" (2025)."""
    below, above = weights < low, weights > high
    return torch.where(below | above, torch.zeros_like(weights), weights), below, above


def sequence_masked(weights: Tensor, gap: Tensor, mask: Tensor, low: float, high: float) -> Bounded:
    """seq-mask-tis: token weights, 0 in samples whose exp(mean(p - g)) is outside. Source: NeMo RL, OpenRLHF.

    gap: [B, T] p - g, 0 where nothing trains.
    """
    mean = torch.nan_to_num(torch.exp(masked_mean(gap, mask)), nan=0.0, posinf=0.0)[:, None]
    below, above = (mean < low).expand_as(weights), (mean > high).expand_as(weights)
    return torch.where(below | above, torch.zeros_like(weights), weights), below, above
