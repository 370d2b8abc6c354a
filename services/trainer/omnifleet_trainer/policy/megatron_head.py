"""Logits of some positions alone: what predicts a prompt's tokens, media above all, is never multiplied by the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


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
    head.sequence_parallel = False
    try:
        yield
    finally:
        hook.remove()
        head.sequence_parallel = between
