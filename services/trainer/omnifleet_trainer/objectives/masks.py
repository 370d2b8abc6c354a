"""Which tokens train. Masks are float tensors of 0 and 1; axes: B samples, S positions, T = S - 1 predictions."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(per_token: Tensor) -> Tensor:
    """[B, S] values of tokens -> [B, T] values of predictions: column t speaks of the token at t + 1.

    Position 0 is never predicted, so it is dropped; nothing else moves.
    """
    return per_token[:, 1:]


def keep_whole(truncated: Tensor, overlong_filtering: bool) -> Tensor:
    """[B] bool, cut by the length limit -> [B] mask; all ones unless `overlong_filtering` (NeMo RL, DAPO)."""
    return (~truncated).float() if overlong_filtering else torch.ones_like(truncated, dtype=torch.float32)
