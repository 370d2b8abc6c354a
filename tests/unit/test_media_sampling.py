"""Which frames a sampling contract takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.address.contract import clip, still
from omnifleet_media.decode.sampling import frame_indices, prompt_clock


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


def by_the_book(
    total: int, fps: float, requested: int, patch: int, source_fps_asked: float = 0.0
) -> list[int]:
    """The reference's sampling as its description reads, one frame at a time."""
    r = total if requested <= 0 else requested
    if source_fps_asked > 0:
        r = min(r, max(1, int(total / fps * source_fps_asked)))
    r = max(1, r)
    n = min(r, total)
    if patch > 1 and n % patch:
        up = math.ceil(n / patch) * patch
        n = up if up <= total and up <= r else max(patch, n // patch * patch)
    if n <= 1 or total <= 1 or (total - 1) / fps <= 0:
        return [0] * n
    times = np.linspace(0, (total - 1) / fps, n)
    once = [min(max(round(float(t) * fps), 0), total - 1) for t in times]
    return [min(max(round(i / fps * fps), 0), total - 1) for i in once]


@given(
    st.integers(1, 5_000),
    st.sampled_from([1.0, 10.0, 23.976, 24000 / 1001, 25.0, 29.97, 30000 / 1001, 59.94, 120.0]),
    st.integers(0, 128),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
@example(20, 10.0, 4, 2, 0.0)
@example(1, 30.0, 32, 2, 0.0)
@example(3, 30.0, 32, 2, 0.0)
def test_nemotron_vl_is_the_reference_s_rule(
    total: int, fps: float, requested: int, patch: int, asked_fps: float
) -> None:
    taken = frame_indices("nemotron_vl@1", total, fps, requested, asked_fps, patch)
    assert taken == by_the_book(total, fps, requested, patch, asked_fps)


@given(st.integers(1, 5_000), st.integers(1, 200))
def test_uniform_is_floor_of_linspace(total: int, asked: int) -> None:
    n = min(asked, total)
    expected = [math.floor(x) for x in np.linspace(0, total - 1, n)]
    assert frame_indices("uniform@1", total, 30.0, asked, 0, 1) == expected


def test_the_prompt_s_clock_is_whole_milliseconds() -> None:
    assert prompt_clock([0, 30, 61], 29.97) == [0.0, 0.99, 2.013]
    assert prompt_clock([0, 1], 30.0) == [0.0, 0.033]
    assert prompt_clock([0, 7], 0.0) == [0.0, 0.0]


def test_picked_frames_are_taken_as_they_are() -> None:
    assert frame_indices("indices@1", 24, 10.0, 0, 0, 1, [23, 0, 12, 12, 5]) == [23, 0, 12, 12, 5]
    with pytest.raises(OmnifleetError) as caught:
        frame_indices("indices@1", 24, 10.0, 0, 0, 1, [24])
    assert (caught.value.reason, caught.value.knob) == (Reason.INVALID_REQUEST, "contract.indices")


@pytest.mark.parametrize(
    ("arguments", "knob"),
    [
        ({"sampling": "middle@1"}, "contract.sampling"),
        ({"sampling": "uniform@1", "fps": -1.0}, "contract.fps"),
        ({"sampling": "uniform@1", "fps": float("nan")}, "contract.fps"),
        ({"sampling": "uniform@1", "fps": float("inf")}, "contract.fps"),
        ({"sampling": "indices@1"}, "contract.indices"),
        ({"sampling": "uniform@1", "indices": [1]}, "contract.indices"),
        ({"sampling": "uniform@1", "background": "white"}, "contract.background"),
    ],
)
def test_contracts_that_mean_nothing_are_refused(arguments: dict[str, Any], knob: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        clip(**arguments)
    assert caught.value.knob == knob


def test_hsh_08_a_picture_s_alias_has_no_option_of_clips() -> None:
    assert set(still().as_alias_part()) == {"background", "rules", "sampling"}
    assert still().as_alias_part() != still("000000").as_alias_part()
    one, other = clip("uniform@1", 8).as_alias_part(), clip("uniform@1", 16).as_alias_part()
    assert one != other  # hsh_07


def test_an_unknown_contract_is_refused() -> None:
    with pytest.raises(OmnifleetError, match="not known"):
        frame_indices("middle@1", 10, 10.0, 1, 0, 1)
