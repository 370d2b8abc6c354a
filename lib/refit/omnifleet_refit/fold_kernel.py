"""The row sums of `fold` as one Triton kernel. Imported on CUDA only."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def sum_rows(  # type: ignore[no-untyped-def]
    data, keys, sums, rows, ROW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """sums[rows, WIDE] = data[rows, ROW] @ keys[ROW, WIDE]: int8 in, int32 out; keys lie column after column."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, WIDE)
    total = tl.zeros((BLOCK, WIDE), dtype=tl.int32)
    for at in range(0, ROW, STEP):
        column = at + tl.arange(0, STEP)
        piece = tl.load(data + row[:, None] * ROW + column[None, :], mask=row[:, None] < rows, other=0)
        key = tl.load(keys + lane[None, :] * ROW + column[:, None])
        total += tl.dot(piece, key, out_dtype=tl.int32)
    tl.store(sums + row[:, None] * WIDE + lane[None, :], total, mask=row[:, None] < rows)
