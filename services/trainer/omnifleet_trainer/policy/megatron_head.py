"""Logits of some positions alone: what predicts a prompt's tokens, media above all, is never multiplied by the vocabulary. And
of what is, not all at once (`trainer.logprob_chunk`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Logprobs = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Logits [B, T, V], of tensor-parallel ranks their part, ids [B, T] and kept ids [B, T, K] or None -> [B, T]."""


@contextmanager
def heading(head: Any, rows: Tensor | slice) -> Iterator[None]:
    """Inside, of hidden states [S, B, H] only `rows` of the first axis reach `head`, a model's `output_layer`.

    rows: of all S also where sequence-parallel ranks have a part of them each: they are gathered here instead of in the
    head, whose gradients are added up over the ranks before they come back to the gathering.
    """
    between = head.sequence_parallel

    def chosen(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *more = arguments
        if between:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[rows], *more

    hook = head.register_forward_pre_hook(chosen)
    try:
        with _whole_rows(head):
            yield
    finally:
        hook.remove()


def chunked_logprobs(
    head: Any,
    rows: Tensor | slice,
    run: Callable[[], Tensor],
    ids: Tensor,
    kept: Tensor | None,
    *,
    chunk: int,
    logprobs: Logprobs,
) -> Tensor:
    """What `logprobs` makes of run()'s logits inside `heading`, [B, T] as ids; logits never exist but for `chunk` positions.

    run: the model's forward, which takes `head`'s output as its own, [S, B, ..] -> [B, S, ..]. Each chunk's logits are
    computed again in the backward pass. Ranks that share `head` have as many chunks.
    """
    hidden, weight = _before(head, rows, run)
    flat, wanted = hidden.reshape(-1, 1, hidden.shape[-1]), ids.reshape(1, -1)
    masks = None if kept is None else kept.reshape(1, wanted.shape[1], -1)

    def of(part: Tensor, ids: Tensor, kept: Tensor | None) -> Tensor:
        with _whole_rows(head):  # also when it is done again, long after
            logits, _ = head(part, weight=weight)
        return logprobs(logits.transpose(0, 1), ids, kept)

    found = []
    for start in range(
        0, max(wanted.shape[1], 1), chunk
    ):  # one of nothing at least: gradients go back through it
        cut = slice(start, start + chunk)
        piece = (flat[cut], wanted[:, cut], None if masks is None else masks[:, cut])
        if torch.is_grad_enabled():
            found.append(checkpoint(of, *piece, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(of(*piece))
    return torch.cat(found, 1).view(ids.shape)


def _before(head: Any, rows: Tensor | slice, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Hidden states [B, rows, H] that `head` would have multiplied, and by what if not by its own weight."""
    weights: list[Tensor | None] = []

    def nothing(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        weights.append(weight)
        return hidden, None

    head.forward = nothing
    try:
        with heading(head, rows):
            hidden = run()
    finally:
        del head.forward
    return hidden, weights[0]


@contextmanager
def _whole_rows(head: Any) -> Iterator[None]:
    """Inside, `head` gathers nothing, and its gradients are added up over ranks."""
    before = head.sequence_parallel
    head.sequence_parallel = False
    try:
        yield
    finally:
        head.sequence_parallel = before
