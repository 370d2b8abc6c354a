"""Byte ranges, by RFC 9110."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet_media.server.ranges import requested_slice, still_holds

TAG = '"abc"'


@pytest.mark.parametrize(
    ("header", "bounds"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=3-", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-40", (0, 10)),
        ("bytes=5-500", (5, 10)),
        ("BYTES = 1 - 2 ", (1, 3)),
        (f"bytes=0-{10**30}", (0, 10)),
    ],
)
def test_single_ranges(header: str, bounds: tuple[int, int]) -> None:
    found = requested_slice(header, "", TAG, 10)
    assert (found.start, found.end, found.partial, found.satisfiable) == (*bounds, True, True)
    assert found.content_range == f"bytes {bounds[0]}-{bounds[1] - 1}/10"


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-20", "bytes=-0", f"bytes={10**30}-"])
def test_ranges_beyond_the_end_are_not_satisfiable(header: str) -> None:
    found = requested_slice(header, "", TAG, 10)
    assert not found.satisfiable
    assert found.content_range == "bytes */10"


def test_an_empty_representation_satisfies_no_range() -> None:
    assert not requested_slice("bytes=0-", "", TAG, 0).satisfiable
    assert not requested_slice("bytes=-5", "", TAG, 0).satisfiable
    assert requested_slice("", "", TAG, 0).satisfiable


@pytest.mark.parametrize(
    "header",
    ["", "bytes=5-4", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0-1,3-4", "bytes=--1", "bytes 0-1"],
)
def test_what_is_ignored_gives_everything(header: str) -> None:
    found = requested_slice(header, "", TAG, 10)
    assert (found.start, found.end, found.partial) == (0, 10, False)


def test_if_range_holds_for_this_very_tag_only() -> None:
    assert requested_slice("bytes=0-1", TAG, TAG, 10).partial
    for other in ('"xyz"', 'W/"abc"', "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert not requested_slice("bytes=0-1", other, TAG, 10).partial


def test_if_none_match() -> None:
    assert still_holds(TAG, TAG)
    assert still_holds(f'"x", W/{TAG}', TAG)
    assert still_holds("*", TAG)
    assert not still_holds("", TAG)
    assert not still_holds('"abcd"', TAG)


@given(st.text(max_size=40), st.integers(0, 50))
def test_a_slice_never_leaves_the_bytes(header: str, whole: int) -> None:
    found = requested_slice(f"bytes={header}", "", TAG, whole)
    assert 0 <= found.start <= found.end <= whole
