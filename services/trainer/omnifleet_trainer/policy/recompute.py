"""Activation checkpointing: a layer keeps its input and computes the rest again in the backward pass.

Libraries switch theirs on in training mode only; policies stay in eval mode, where no dropout separates two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Again = Callable[[], AbstractContextManager[None]]
"""Called while a layer computes: what must be open around it when it does so again."""


def recompute_layers(model: nn.Module, again: Again = nullcontext) -> int:
    """Every layer of the model's outermost lists (of the decoder, of the tower) recomputes; how many do."""
    count = 0
    for layers in _outermost(model):
        for layer in layers:
            layer.forward = partial(_recomputed, layer.forward, again)
            count += 1
    return count


def _recomputed(forward: Callable[..., Any], again: Again, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), again()),
        **kwargs,
    )


def _outermost(module: nn.Module) -> list[nn.ModuleList]:
    found: list[nn.ModuleList] = []
    for child in module.children():
        found += [child] if isinstance(child, nn.ModuleList) else _outermost(child)
    return found
