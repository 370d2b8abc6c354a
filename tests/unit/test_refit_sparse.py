"""The sparse form of a tensor: exact for any bits, smaller or not made, and refused when it is damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnifleet.wire.sparse import apply_sparse, encode_sparse
from omnifleet_refit.sparse import decode, encode, sparse_sizes

WIDTHS = (1, 2, 4, 8)


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """(width, old, new): of any bits, NaNs and signed zeros among them, a few elements of them changed."""
    width = draw(st.sampled_from(WIDTHS))
    count = draw(st.integers(1, 300))
    old = draw(st.binary(min_size=count * width, max_size=count * width))
    new = bytearray(old)
    for place in draw(st.lists(st.integers(0, count - 1), max_size=40)):
        new[place * width : (place + 1) * width] = draw(st.binary(min_size=width, max_size=width))
    return width, old, bytes(new)


@given(changes())
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_makes_the_new_bytes_of_the_old_ones(case: tuple[int, bytes, bytes]) -> None:
    width, old, new = case
    payload = encode_sparse(old, new, width)
    if payload is None:
        different = sum(old[i : i + width] != new[i : i + width] for i in range(0, len(old), width))
        assert different * (4 + width) >= len(new)
        return
    assert len(payload) < len(new)
    data = bytearray(old)
    apply_sparse(data, payload, width)
    assert bytes(data) == new


@given(changes(), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_never_write_outside_and_are_refused_or_seen(
    case: tuple[int, bytes, bytes], data: st.DataObject
) -> None:
    width, old, _ = case
    payload = data.draw(st.binary(max_size=200))
    into = bytearray(old)
    try:
        apply_sparse(into, payload, width)
    except ValueError:
        assert into == old, "refused means unchanged"
    assert len(into) == len(old)


def test_a_minus_zero_and_a_nan_of_other_bits_are_changes() -> None:
    old = np.array([0.0, np.nan] + [1.0] * 20, np.float32)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] ^= 1
    payload = encode_sparse(old.tobytes(), new.tobytes(), 4)
    assert payload is not None and len(payload) == 16
    data = bytearray(old.tobytes())
    apply_sparse(data, payload, 4)
    assert bytes(data) == new.tobytes()


@pytest.mark.parametrize("indices", [[3, 2], [2, 2], [1, 99]], ids=["descending", "twice", "outside"])
def test_indices_that_no_sender_makes_are_refused(indices: list[int]) -> None:
    payload = np.array(indices, "<u4").tobytes() + bytes(2 * len(indices))
    with pytest.raises(ValueError, match="ascend"):
        apply_sparse(bytearray(20), payload, 2)
    with pytest.raises(ValueError, match="whole number"):
        apply_sparse(bytearray(20), payload[:-1], 2)
    with pytest.raises(ValueError, match="compared"):
        encode_sparse(bytes(4), bytes(8), 2)


DTYPES = {1: torch.bool, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@given(changes())
@settings(max_examples=100, deadline=None)
def test_the_device_makes_the_same_bytes_and_the_same_tensors(case: tuple[int, bytes, bytes]) -> None:
    width, old, new = case
    before, after = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (old, new))
    if width > 1:
        before, after = before.view(DTYPES[width]), after.view(DTYPES[width])
    ((count, size),) = sparse_sizes([(before, after)])
    assert count == sum(old[i : i + width] != new[i : i + width] for i in range(0, len(old), width))
    payload = encode(before, after)
    assert payload.numel() == size == count * (4 + width)
    defined = encode_sparse(old, new, width)
    assert defined in (None, payload.numpy().tobytes()) and (defined is None) == (size >= len(new))
    decode(payload, before)
    assert before.view(torch.uint8).numpy().tobytes() == new


def test_a_damaged_payload_changes_nothing_on_the_device() -> None:
    old, new = torch.zeros(10), torch.zeros(10)
    new[3], new[7] = 1, float("nan")
    payload = encode(old, new)
    twice, beyond, behind = payload.clone(), payload.clone(), payload.clone()
    twice[4] = 3
    beyond[4] = 10
    behind[7] = 255  # as a signed number it would be negative
    for damaged in (twice, beyond, behind, payload[:-1]):
        tensor = torch.zeros(10)
        with pytest.raises(ValueError, match=r"ascend|whole number"):
            decode(damaged, tensor)
        assert not tensor.any()
