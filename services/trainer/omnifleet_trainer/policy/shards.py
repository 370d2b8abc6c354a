"""Weights that are spread over ranks (torch's DTensor), and plain ones: one way to read and write either."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; collective if it is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: Tensor) -> Tensor:
    """This rank's part, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread(full: Tensor, like: Tensor) -> Tensor:
    """`full`, which every rank holds, placed like `like`, in its dtype and on its device. No rank talks."""
    moved = full.to(device=like.device, dtype=like.dtype)
    if not isinstance(like, DTensor):
        return moved
    placed: Any = distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
    return placed  # type: ignore[no-any-return]


class Kept:
    """Deals the tensors of a checkpoint to the ranks that copy and write them, in turn; each is copied whole."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world, self._turn = rank, world, 0

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """A copy on the host if it is this rank's turn. All ranks call, in the same order, with the same tensor."""
        full, mine = whole(tensor.detach()), self._turn % self.world == self.rank
        self._turn += 1
        return full.to("cpu", copy=True).contiguous() if mine else None
