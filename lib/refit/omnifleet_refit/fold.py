"""`omnifleet.wire.fold` on the device of the weights, computed by sender and receivers alike; a test holds it to the definition.

On CUDA the row sums are one fused Triton kernel (int8 tensor cores, one pass over the bytes); elsewhere, and where
Triton is not, torch's integer GEMM, which gives the same sums slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise

import torch

from omnifleet.wire.fold import LANES, MULTIPLIERS, ROW_BYTES, SHIFT, WORDS, fold_keys

_LEAST_ROWS = 32
"""CUDA's integer GEMM takes no fewer than 17 rows."""
_WIDE = 16
"""Lanes of the kernel: tensor cores take no fewer; those beyond LANES have keys of zero."""
_BLOCK, _STEP = 64, 256
_TRITON = find_spec("triton") is not None
_P1, _P2, _P3 = (p - (1 << 64) if p >> 63 else p for p in MULTIPLIERS)


def fold(bucket: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Digests of the tensors in a bucket, on its device, without waiting for it: int64 [len(starts), WORDS].

    bucket: uint8, a multiple of ROW_BYTES long. starts: byte offset of each tensor, ascending, multiples of ROW_BYTES;
    a tensor reaches to the next one, padding of zeros included.
    """
    return digests(row_sums(bucket), starts)


def row_sums(bucket: torch.Tensor) -> torch.Tensor:
    """The keyed sums of each row, int32 [rows, LANES]; the only pass over the bytes."""
    rows = bucket.numel() // ROW_BYTES
    matrix = bucket.view(torch.int8).view(rows, ROW_BYTES)
    if bucket.is_cuda and _TRITON:
        sums = torch.empty(rows, _WIDE, dtype=torch.int32, device=bucket.device)
        from omnifleet_refit.fold_kernel import sum_rows

        with torch.cuda.device(bucket.device):
            keys = _keys(bucket.device, _WIDE)
            sum_rows[(-(-rows // _BLOCK),)](matrix, keys, sums, rows, ROW_BYTES, _WIDE, _BLOCK, _STEP)
        return sums[:, :LANES]
    if rows < _LEAST_ROWS:
        matrix = torch.cat([matrix, matrix.new_zeros(_LEAST_ROWS - rows, ROW_BYTES)])
    return torch._int_mm(matrix, _keys(bucket.device, LANES))[:rows]


def digests(sums: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Digests [len(starts), WORDS] from row sums, of one bucket or of several that follow each other."""
    words = sums.contiguous().view(torch.int64)
    places, bounds = _layout(len(words), tuple(starts), sums.device)
    z = (words ^ places) * _P2
    mixed = (z ^ ((z >> SHIFT) & ((1 << (64 - SHIFT)) - 1))) * _P3
    # One scan a word: over the outer dimension of few columns a device scans row after row.
    scans = [mixed[:, word].contiguous().cumsum(0) for word in range(WORDS)]
    totals = torch.cat([mixed.new_zeros(1, WORDS), torch.stack(scans, 1)])
    return totals[bounds[1:]] - totals[bounds[:-1]]


def as_hex(digests: torch.Tensor) -> list[str]:
    """Digests as they stand in a manifest. Waits for the device."""
    return [row.tobytes().hex() for row in digests.cpu().numpy().astype("<i8")]


@cache
def _keys(device: torch.device, wide: int) -> torch.Tensor:
    """[ROW_BYTES, wide], laid out by columns, as integer GEMMs want it."""
    columns = torch.zeros(wide, ROW_BYTES, dtype=torch.int8)
    columns[:LANES] = torch.from_numpy(fold_keys().T.copy())
    return columns.to(device).t()


@lru_cache(64)
def _layout(rows: int, starts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """j * P1 for each row, j its number within its tensor [rows, 1]; and the tensors' bounds in rows [len(starts) + 1].

    Kept, since a copy to the device would wait for it, and the layout of a model does not change.
    """
    bounds = [*(s // ROW_BYTES for s in starts), rows]
    counts = [torch.arange(1, end - begin + 1) for begin, end in pairwise(bounds)]
    numbers = torch.cat([torch.zeros(bounds[0], dtype=torch.int64), *counts])
    return (numbers * _P1)[:, None].to(device), torch.tensor(bounds, device=device)
