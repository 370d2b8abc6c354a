"""The sequence-error mask. Source: NeMo RL `seq_logprob_error_threshold`."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_errors(generation: Tensor, prev: Tensor, token_mask: Tensor) -> Tensor:
    """e = mean over trained tokens of exp|g - p|; [B, T] logprobs and mask -> [B], 0 where none trains."""
    error = torch.exp((generation - prev).abs()) * token_mask
    return error.sum(-1) / token_mask.sum(-1).clamp(min=1)


def within_error(errors: Tensor, threshold: float | None) -> Tensor:
    """[B] errors -> [B] mask of samples with e <= threshold; all ones without a threshold."""
    return torch.ones_like(errors) if threshold is None else (errors <= threshold).to(errors.dtype)
