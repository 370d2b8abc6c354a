"""Log-probabilities of given tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 2048,
    kept: Tensor | None = None,
) -> Tensor:
    """log softmax(logits / temperature)[target] in at least float32.

    logits: [B, T, V]; targets: [B, T] ids; returns [B, T]. `chunk` positions are widened to float32 at a time and
    widened again in the backward pass, so the peak holds one chunk of V floats a position, not all of them.
    kept: [B, T, K] ids that survived the sampler's filters, padded with -1; the softmax is then over these only (and
    over the target). A row of -1 alone means no filter. Source: keep-mask replay, DeepSeek-V3.2 report.
    Raises ValueError unless temperature > 0.
    """
    rows, ids = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    masks = None if kept is None else kept.reshape(len(ids), -1)
    _check(temperature)
    parts = []
    for start in range(0, len(ids), chunk):
        cut = slice(start, start + chunk)
        piece = (rows[cut], ids[cut], temperature, None if masks is None else masks[cut])
        if logits.requires_grad and len(ids) > chunk:
            parts.append(checkpoint(_gathered, *piece, use_reentrant=False))
        else:
            parts.append(_gathered(*piece))
    return _joined(parts, rows).view(targets.shape)


def hidden_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    kept: Tensor | None = None,
) -> Tensor:
    """The same from hidden states [B, T, H] and the head's weights [V, H]; logits never exist but for one chunk.

    Forward and backward compute a chunk's logits anew, so the peak is chunk x V floats (a few times), whatever B x T.
    Differentiable in `hidden` and `head`. For models whose head is a plain matrix product without a bias.
    """
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    masks = None if kept is None else kept.reshape(len(ids), -1)
    _check(temperature)
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    parts = []
    for start in range(0, len(ids), chunk):
        cut = slice(start, start + chunk)
        piece = (rows[cut], head, ids[cut], temperature, None if masks is None else masks[cut])
        if differentiable:
            parts.append(checkpoint(_projected, *piece, use_reentrant=False))
        else:
            parts.append(_projected(*piece))
    return _joined(parts, rows).view(targets.shape)


def _check(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no density; it must be above 0")


def _joined(parts: list[Tensor], rows: Tensor) -> Tensor:
    return torch.cat(parts) if parts else rows.new_zeros(0)


def _projected(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, kept: Tensor | None
) -> Tensor:
    return _gathered(torch.nn.functional.linear(hidden, head), targets, temperature, kept)


def _gathered(logits: Tensor, targets: Tensor, temperature: float, kept: Tensor | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        wide = wide / temperature
    chosen = wide.gather(-1, targets[:, None])
    total = torch.logsumexp(wide, dim=-1)
    if kept is not None:
        total = torch.where((kept >= 0).any(-1), _log_total(wide, chosen, targets, kept), total)
    return chosen[:, 0] - total


def _log_total(wide: Tensor, chosen: Tensor, targets: Tensor, kept: Tensor) -> Tensor:
    """logsumexp over the kept ids of each row and its target, each once."""
    counted = (kept >= 0) & (kept != targets[:, None])
    others = wide.gather(-1, kept.clamp(min=0)).masked_fill(~counted, float("-inf"))
    return torch.logsumexp(torch.cat([others, chosen], dim=-1), dim=-1)
