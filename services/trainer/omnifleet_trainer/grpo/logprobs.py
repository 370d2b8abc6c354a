"""Log-probabilities of given tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 2048) -> Tensor:
    """log softmax(logits / temperature)[target] in at least float32.

    logits: [B, T, V]; targets: [B, T] ids; returns [B, T]. `chunk` positions are widened to float32 at a time and
    widened again in the backward pass, so the peak holds one chunk of V floats a position, not all of them.
    Raises ValueError unless temperature > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no density; it must be above 0")
    rows, ids = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    parts = []
    for start in range(0, len(ids), chunk):
        piece = (rows[start : start + chunk], ids[start : start + chunk], temperature)
        if logits.requires_grad and len(ids) > chunk:
            parts.append(checkpoint(_gathered, *piece, use_reentrant=False))
        else:
            parts.append(_gathered(*piece))
    flat = torch.cat(parts) if parts else rows.new_zeros(0)
    return flat.view(targets.shape)


def _gathered(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    chosen = wide.gather(-1, targets[:, None])[:, 0]
    return chosen - torch.logsumexp(wide, dim=-1)
