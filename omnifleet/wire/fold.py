"""The device checksum of refits, byte for byte: this file defines it, in numpy; services compute it where the weights are.

A tensor's bytes, padded with zeros to rows of ROW_BYTES, are a matrix of int8. Each row is multiplied by a fixed int8
matrix of ROW_BYTES x LANES (exact int32 sums: a plain integer GEMM, so it runs at memory speed on any device). The
LANES sums of row j are read as WORDS int64 x and mixed: y = f(x ^ j * P1) with f(x) = (z ^ z >>> 29) * P3, z = x * P2,
for j = 1, 2, ...; all modulo 2**64. The digest is the sum of y over the rows, little-endian, as hex.

What it detects. Always: any change of one or two bytes within a row, if no other row changed (no two rows of the key
matrix are parallel, none is zero; a test looks). Any other change that does not depend on the keys: missed with odds
of at most 2**-64 (each of 8 lanes has 8 key bits against a given difference), or, over several rows, 2**-256 if f
scatters. Order counts: of bytes within a row by the keys, of rows by j. It is no defence against someone who knows the
keys and means to deceive; manifests that describe files keep BLAKE3.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ALGORITHM = "fold-1"
ROW_BYTES = 4096
LANES = 8
WORDS = LANES // 2
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""P1, P2, P3: odd."""
SHIFT = 29


def fold_keys() -> NDArray[np.int8]:
    """The key matrix [ROW_BYTES, LANES]: SHAKE-128 of the algorithm's name."""
    raw = hashlib.shake_128(f"omnifleet {ALGORITHM}".encode()).digest(ROW_BYTES * LANES)
    return np.frombuffer(raw, np.int8).reshape(ROW_BYTES, LANES)


def fold_digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one tensor's bytes as 64 hex characters. The reference: slow."""
    raw = bytes(data)
    rows = np.frombuffer(raw + bytes(-len(raw) % ROW_BYTES), np.int8).reshape(-1, ROW_BYTES)
    sums = rows.astype(np.int32) @ fold_keys().astype(np.int32)
    words = np.ascontiguousarray(sums, "<i4").view("<u8")
    p1, p2, p3 = (np.uint64(p) for p in MULTIPLIERS)
    with np.errstate(over="ignore"):
        z = (words ^ (np.arange(1, len(words) + 1, dtype=np.uint64) * p1)[:, None]) * p2
        mixed = (z ^ (z >> np.uint64(SHIFT))) * p3
        return bytes(mixed.sum(0, dtype=np.uint64).astype("<u8").tobytes()).hex()
