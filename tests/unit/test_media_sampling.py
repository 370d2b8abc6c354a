"""Which frames a sampling contract takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError
from omnifleet_media.decode.sampling import frame_indices


@pytest.mark.parametrize(
    ("total", "asked", "patch", "expected"),
    [
        (10, 4, 1, [0, 3, 6, 9]),
        (3, 8, 1, [0, 1, 2]),
        (5, 5, 2, [0, 1, 2, 4]),
        (1, 4, 2, [0]),
        (4, 0, 1, [0, 1, 2, 3]),
    ],
)
def test_uniform(total: int, asked: int, patch: int, expected: list[int]) -> None:
    assert frame_indices("uniform@1", total, 10.0, asked, 0, patch) == expected


@pytest.mark.parametrize(
    ("total", "asked", "patch", "expected"),
    [(20, 4, 2, [0, 6, 13, 19]), (1, 32, 2, [0, 0]), (3, 32, 2, [0, 2]), (7, 6, 4, [0, 2, 4, 6])],
)
def test_nemotron_vl(total: int, asked: int, patch: int, expected: list[int]) -> None:
    assert frame_indices("nemotron_vl@1", total, 10.0, asked, 0, patch) == expected


def test_fps_bounds_the_number_of_frames() -> None:
    assert len(frame_indices("nemotron_vl@1", 300, 30.0, 32, 1.0, 2)) == 10
    assert len(frame_indices("uniform@1", 300, 30.0, 32, 1.0, 2)) == 10


@given(
    st.sampled_from(["uniform@1", "nemotron_vl@1"]),
    st.integers(1, 400),
    st.floats(0.5, 120),
    st.integers(0, 64),
    st.integers(1, 4),
)
def test_indices_are_in_order_and_in_the_clip(
    sampling: str, total: int, fps: float, asked: int, patch: int
) -> None:
    indices = frame_indices(sampling, total, fps, asked, 0, patch)
    assert indices == sorted(indices)
    assert indices[0] == 0
    assert indices[-1] < total


def test_an_unknown_contract_is_refused() -> None:
    with pytest.raises(OmnifleetError, match="not known"):
        frame_indices("middle@1", 10, 10.0, 1, 0, 1)
