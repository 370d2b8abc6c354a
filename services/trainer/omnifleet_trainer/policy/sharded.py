"""A model whose weights FSDP2 has spread over ranks, used by its parts.

FSDP2 gathers a module's weights in hooks around its forward, and the root's hooks must come first. The policy runs the
model's parts (embedding, tower, decoder, head) one by one; so the root's forward is made to run what it is given, and
all of that happens inside its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

Value = TypeVar("Value")


def make_enterable(module: Any) -> None:
    """From now on `module(call)` is `call()` with the module's weights gathered, in the backward pass too."""
    module.forward = _enter


def enter(module: nn.Module, call: Callable[[], Value]) -> Value:
    """`call()` inside an enterable module, or as it is."""
    return module(call) if module.__dict__.get("forward") is _enter else call()


def plain_forward(module: Any, **arguments: Any) -> Any:
    """The module's computation without its hooks."""
    return type(module).forward(module, **arguments)


def _enter(call: Callable[[], Value]) -> Value:
    value: Any = call()
    if isinstance(value, Tensor) and value._is_view():  # FSDP2 hangs its backward hook on what is returned
        value = value.clone()
    return value  # type: ignore[no-any-return]
