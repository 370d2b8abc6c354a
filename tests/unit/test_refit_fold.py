"""The device checksum: what it is, what it sees, and that the code for devices computes it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnifleet.wire.fold import LANES, ROW_BYTES, fold_digest, fold_keys
from omnifleet_refit.fold import as_hex, fold


def padded(parts: list[bytes]) -> tuple[torch.Tensor, list[int]]:
    starts, data = [], bytearray()
    for part in parts:
        starts.append(len(data))
        data += part + bytes(-len(part) % ROW_BYTES)
    return torch.frombuffer(data, dtype=torch.uint8), starts


@given(st.lists(st.binary(min_size=1, max_size=3 * ROW_BYTES), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_device_computes_what_is_defined(parts: list[bytes]) -> None:
    bucket, starts = padded(parts)
    expected = [fold_digest(part) for part in parts]
    assert as_hex(fold(bucket, starts)) == expected


def test_the_definition_does_not_move() -> None:
    assert fold_digest(b"omnifleet") == "68703a381e2849c0ee122237d18f4031eed9f57eceb80d1eb85e8e9b1994cb66"


def test_no_row_of_keys_is_zero_or_parallel_to_another() -> None:
    """So a change of one or two bytes in a row is always seen: d1 k1 + d2 k2 = 0 in all lanes needs parallel rows."""
    keys = fold_keys().astype(np.int64)
    assert keys.shape == (ROW_BYTES, LANES) and np.all(np.any(keys != 0, axis=1))
    divisor = np.gcd.reduce(np.abs(keys), axis=1)
    first = np.array([row[np.flatnonzero(row)[0]] for row in keys])
    directions = keys // divisor[:, None] * np.sign(first)[:, None]
    assert len(np.unique(directions, axis=0)) == ROW_BYTES


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_flips_swaps_cuts_and_moves_are_seen(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    raw = bytearray(rng.integers(0, 256, 3 * ROW_BYTES, np.uint8).tobytes())
    before = fold_digest(raw)
    kind = data.draw(st.sampled_from(["flip", "swap bytes", "swap rows", "zero a row", "shift"]))
    other = bytearray(raw)
    if kind == "flip":
        other[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "swap bytes":
        i, j = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, len(raw) - 1))
        other[i], other[j] = raw[j], raw[i]
    elif kind == "swap rows":
        other[:ROW_BYTES], other[ROW_BYTES : 2 * ROW_BYTES] = raw[ROW_BYTES : 2 * ROW_BYTES], raw[:ROW_BYTES]
    elif kind == "zero a row":
        other[ROW_BYTES : 2 * ROW_BYTES] = bytes(ROW_BYTES)
    else:
        other = raw[2:] + raw[:2]
    assert (fold_digest(other) == before) == (other == raw)
