"""`omnifleet.wire.fold` on the device that holds the weights. The trainer has a twin; a test holds both to the definition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import torch

from omnifleet.wire.fold import LANES, MULTIPLIERS, ROW_BYTES, SHIFT, WORDS, fold_keys

_LEAST_ROWS = 32
"""CUDA's integer GEMM takes no fewer than 17 rows."""
_P1, _P2, _P3 = (p - (1 << 64) if p >> 63 else p for p in MULTIPLIERS)


def fold(bucket: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Digests of the tensors in a bucket, on its device, without waiting for it: int64 [len(starts), WORDS].

    bucket: uint8, a multiple of ROW_BYTES long. starts: byte offset of each tensor, ascending, multiples of ROW_BYTES;
    a tensor reaches to the next one, padding of zeros included.
    """
    rows = bucket.numel() // ROW_BYTES
    matrix = bucket.view(torch.int8).view(rows, ROW_BYTES)
    if rows < _LEAST_ROWS:
        matrix = torch.cat([matrix, matrix.new_zeros(_LEAST_ROWS - rows, ROW_BYTES)])
    sums = torch._int_mm(matrix, _keys(bucket.device))[:rows].contiguous()
    words = sums.view(torch.int64)
    places, bounds = _layout(rows, tuple(starts), bucket.device)
    z = (words ^ places) * _P2
    mixed = (z ^ ((z >> SHIFT) & ((1 << (64 - SHIFT)) - 1))) * _P3
    totals = torch.cat([mixed.new_zeros(1, WORDS), mixed.cumsum(0)])
    return totals[bounds[1:]] - totals[bounds[:-1]]


def as_hex(digests: torch.Tensor) -> list[str]:
    """Digests as they stand in a manifest. Waits for the device."""
    return [row.tobytes().hex() for row in digests.cpu().numpy().astype("<i8")]


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """[ROW_BYTES, LANES], laid out by columns, as integer GEMMs want it."""
    columns = torch.from_numpy(fold_keys().T.copy()).to(device)
    assert columns.shape == (LANES, ROW_BYTES)
    return columns.t()


@lru_cache(4096)
def _layout(rows: int, starts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """j * P1 for each row, j its number within its tensor [rows, 1]; and the tensors' bounds in rows [len(starts) + 1].

    Kept, since a copy to the device would wait for it, and the layout of a model does not change.
    """
    bounds = [*(s // ROW_BYTES for s in starts), rows]
    counts = [torch.arange(1, end - begin + 1) for begin, end in pairwise(bounds)]
    numbers = torch.cat([torch.zeros(bounds[0], dtype=torch.int64), *counts])
    return (numbers * _P1)[:, None].to(device), torch.tensor(bounds, device=device)
