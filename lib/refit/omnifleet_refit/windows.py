"""Windows into tensors: which elements of a source one rank reads, and how ranks say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from omnifleet.wire.needs import NeedsBody, WindowBody


@dataclass(frozen=True, slots=True)
class View:
    """A strided window into a tensor's storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        """The window that a tensor is."""
        return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @staticmethod
    def parse(body: WindowBody) -> View:
        """Undo `body`."""
        offset, shape, stride = body
        return View(int(offset), tuple(map(int, shape)), tuple(map(int, stride)))

    @property
    def body(self) -> WindowBody:
        """As plain data."""
        return self.offset, list(self.shape), list(self.stride)

    @property
    def elements(self) -> int:
        """How many it shows."""
        return prod(self.shape)

    def lies_within(self, elements: int) -> bool:
        """True if all of it lies in a storage of so many elements."""
        if len(self.shape) != len(self.stride) or min((self.offset, *self.shape, *self.stride)) < 0:
            return False
        last = self.offset + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )
        return 0 in self.shape or last < elements

    def on(self, tensor: torch.Tensor, base: int = 0) -> torch.Tensor:
        """The same window into the storage of `tensor`, moved on by `base` elements."""
        return tensor.as_strided(self.shape, self.stride, self.offset + base)


Needs = Mapping[str, Sequence[View]]
"""What one rank reads of each source tensor, contiguous ones: each window once."""


def needs_body(needs: Needs) -> NeedsBody:
    """As plain data, in order of names."""
    return {name: [view.body for view in views] for name, views in sorted(needs.items())}


def needs_of(body: NeedsBody) -> Needs:
    """Undo `needs_body`."""
    return {name: [View.parse(window) for window in windows] for name, windows in body.items()}
