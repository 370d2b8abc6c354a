"""Tensors whose memory is on the host for a while, and that stay the same objects.

A parameter that moves to another device, or gets another dtype, loses the node of autograd that others have hung their hooks
on (torch resets it): Megatron's gradients would then never reach its buffers. So memory is freed under the tensor instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Parked:
    """The memory of `tensors`, copied to the host and freed on the device; views of one memory stay views of it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {s.data_ptr(): s for t in tensors if (s := t.untyped_storage()).size()}
        self._held = [(storage, _on_the_host(storage)) for storage in storages.values()]
        for storage, _ in self._held:
            storage.resize_(0)

    def restore(self) -> None:
        """Give each its memory and its values again."""
        for storage, kept in self._held:
            storage.resize_(kept.size())
            storage.copy_(kept)
        self._held.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Its parameters and buffers. Megatron's data-parallel wrapper has a list named `buffers` where torch has a method."""
    return [*model.parameters(), *(buffer for _, buffer in model.named_buffers())]


def _on_the_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    kept = torch.UntypedStorage(storage.size())  # type: ignore[no-untyped-call]
    kept.copy_(storage)
    return kept
