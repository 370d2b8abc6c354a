"""Content addresses against fixed vectors (docs/api/addresses.md) and their properties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from omnifleet.address import (
    alias_key,
    canonical_json,
    digest_bytes,
    file_digest,
    frame_digest,
    manifest_bytes,
    media_digest,
    processor_fingerprint,
    segment_key,
    source_digest,
    token_digest,
)
from omnifleet.types import MediaKind
from omnifleet_media.address.contract import still
from omnifleet_media.address.manifest import MediaObject

WIDE = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
FRAME = "9e0cd50b38f594344ea8a7d9ae553e54d6a2645106622531ba27c0a704d75a7b"
PICTURE = "40d41a033690b39014651862658b042b0803f169b9ecd0269bbe5a77d1e73c8b"
CLIP = "cec8a1e9a34bdf38bebf4f8b245c565ef4c6db306c0db7dbd7de2a610fbd2a22"
SOURCE = "a06b723799551a8250f82f8a7256ab8a6f97dfc49a3c4d4ee353df3d89510cd8"
PROCESSOR = "20b7b2173ed0a80f89b4f32d6ccd91d770908da68ce835e0291f3b2d7acbe00b"
VECTORS = {
    "source of nothing": (
        source_digest(b""),
        "c4b60f720ea7ffd9e97cef5b4df1db3e01f3393d3704978e6edbbc8fd893509e",
    ),
    "source abc": (source_digest(b"abc"), SOURCE),
    "frame, 2 wide": (frame_digest(WIDE), FRAME),
    "frame, 2 high": (
        frame_digest(WIDE.reshape(2, 1, 3)),
        "58151c97f4ae1b4c04412d07a971ce43fa87f71897a5e0998913ca49f378d1b4",
    ),
    "picture": (media_digest(manifest_bytes(MediaKind.IMAGE, [FRAME])), PICTURE),
    "clip": (media_digest(manifest_bytes(MediaKind.VIDEO, [FRAME, FRAME], [0, 500_000])), CLIP),
    "processor": (processor_fingerprint("P", {"b": [0.5, 1], "a": None}, "transformers 5.18.0"), PROCESSOR),
    "segment": (
        segment_key(CLIP, PROCESSOR),
        "f9c7b09a307ed63707860a9ec50251a5b9f8fa53e751456ff9e387301e8545fd",
    ),
    "tensors": (
        digest_bytes(b"abc", "tensors"),
        "0da11c739bcf369b54588ab0b01abf23e6549ab6d03db77dfe23de61adc80fd2",
    ),
    "tokens": (
        token_digest([1, 2, 65536]),
        "c70d869212c1a974cbe9c68549d3ce94b12b6d11904c5c5878ba575e59ba6729",
    ),
    "alias": (
        alias_key(SOURCE, still().as_alias_part()),
        "81aee3ba0286fb4e56a7459a048d49b0b3c39b032e7690d19353f1706f02b310",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str) -> None:
    computed, written = VECTORS[name]
    assert computed == written


@pytest.mark.parametrize("name", VECTORS)
def test_vector_is_documented(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "api" / "addresses.md"
    assert VECTORS[name][1] in page.read_text()


def test_digests_are_blake3_of_a_domain_line_and_the_content() -> None:
    assert source_digest(b"abc") == blake3(b"omnifleet/source/v1\nabc").hexdigest()
    assert frame_digest(WIDE) == blake3(b"omnifleet/frame/v1 uint8 1x2x3 srgb\n\1\2\3\4\5\6").hexdigest()


def test_manifest_bytes_are_canonical() -> None:
    assert (
        manifest_bytes(MediaKind.IMAGE, [FRAME])
        == b'{"frames":["' + FRAME.encode() + b'"],"kind":"image","v":1}'
    )
    assert canonical_json({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


def test_threads_do_not_change_a_digest(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes((3 << 20) + 7)
    (tmp_path / "f").write_bytes(data)
    expected = blake3(b"omnifleet/source/v1\n" + data).hexdigest()
    assert source_digest(data) == expected
    assert file_digest(tmp_path / "f", "source") == expected


def test_a_frame_is_its_values_not_its_strides() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 7, 3), np.uint8)
    turned = np.asfortranarray(pixels)
    assert not turned.flags.c_contiguous
    assert frame_digest(turned) == frame_digest(pixels)


@pytest.mark.parametrize("wrong", [WIDE.astype(np.int16), WIDE[0], np.zeros((1, 1, 4), np.uint8)])
def test_only_canonical_frames_have_an_address(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        frame_digest(wrong)


@given(
    st.binary(min_size=12, max_size=12),
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
)
@settings(max_examples=50, deadline=None)
def test_shape_is_part_of_a_frame(data: bytes, one: tuple[int, int], other: tuple[int, int]) -> None:
    pixels = np.frombuffer(data, np.uint8)
    digests = [frame_digest(pixels.reshape(*shape, 3)) for shape in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)


def test_timing_is_part_of_a_clip_and_facts_are_not_part_of_anything() -> None:
    slow = MediaObject(MediaKind.VIDEO, (FRAME, FRAME), 2, 1, (0, 600_000))
    fast = MediaObject(MediaKind.VIDEO, (FRAME, FRAME), 2, 1, (0, 300_000))
    assert slow.digest != fast.digest
    assert MediaObject(MediaKind.IMAGE, (FRAME,), 2, 1, facts={"mime": "image/png"}).digest == PICTURE
