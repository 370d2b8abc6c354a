"""What every surrogate gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnifleet_trainer.objectives.tensors import Tokens, exp_ratio


@dataclass(frozen=True, slots=True)
class Surrogate:
    """loss: [B, T] with gradient, to be minimised. The rest is for metrics, [B, T], without gradient.

    ratio: r of each token. bounded: r after the bound that this surrogate puts on it (r itself if none).
    low, high: True where that bound took the token's gradient or weight down, below and above.
    """

    loss: Tensor
    ratio: Tensor
    bounded: Tensor
    low: Tensor
    high: Tensor


def token_ratio(tokens: Tokens) -> Tensor:
    """r_t = exp(l_t - old_t), [B, T]."""
    return exp_ratio(tokens.current - tokens.old)


def behaviour_ratio(tokens: Tokens) -> Tensor:
    """ρ_t = exp(l_t - g_t), [B, T], without gradient."""
    return exp_ratio(tokens.current - tokens.generation).detach()


def nowhere(tokens: Tokens) -> Tensor:
    """[B, T] of False."""
    return torch.zeros_like(tokens.mask, dtype=torch.bool)
