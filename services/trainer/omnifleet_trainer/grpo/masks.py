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


def sequence_errors(generation: Tensor, prev: Tensor, token_mask: Tensor) -> Tensor:
    """e_i = mean over trained tokens of exp|generation - prev|; [B, T] logprobs and mask -> [B], 0 where none trains.

    Source: NeMo RL `seq_logprob_error_threshold`.
    """
    error = torch.exp((generation - prev).abs()) * token_mask
    return error.sum(-1) / token_mask.sum(-1).clamp(min=1)


def within_error(errors: Tensor, threshold: float | None) -> Tensor:
    """[B] errors -> [B] mask of samples with e_i <= threshold; all ones without a threshold."""
    return torch.ones_like(errors) if threshold is None else (errors <= threshold).to(errors.dtype)
