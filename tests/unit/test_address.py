"""Content addresses: the vectors of docs/api/addresses.md, computed from its text alone and by the product."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

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
    track_digest,
)
from omnifleet.types import Digest, MediaKind, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import manifest_digest, manifest_json, table_digest
from omnifleet_media.address.contract import clip, still, track
from omnifleet_media.address.manifest import MediaObject
from tests.plain_blake3 import blake3_hex

PAGE = (Path(__file__).parents[2] / "docs" / "api" / "addresses.md").read_text()


class Vector(NamedTuple):
    """One entry of the page."""

    domain: str
    content: bytes
    digest: Digest


def vectors() -> dict[str, Vector]:
    """What the page says, read by nothing but its own rules."""
    block = PAGE.split("```text\n")[1].split("\n```")[0]
    found = {}
    for entry in block.split("\n\n"):
        name, *lines = entry.split("\n")
        fields = [line.partition(":")[::2] for line in lines]
        content = "\n".join(value[1:] for key, value in fields if key == "text").encode()
        for key, value in fields:
            content = (
                bytes.fromhex(value) if key == "hex" else content * int(value) if key == "times" else content
            )
        last = dict(fields)
        found[name.strip("[]")] = Vector(last["domain"].strip(), content, Digest(last["blake3"].strip()))
    return found


VECTORS = vectors()
WIDE = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
FRAME, TRACK = (
    VECTORS["frame of 1 row and 2 columns"].digest,
    VECTORS["track of 0, 0.5, -1 at 16000 samples a second"].digest,
)
PICTURE, CLIP = VECTORS["picture"].digest, VECTORS["clip of that frame at 0 s and 0.5 s"].digest
SOURCE, PROCESSOR = VECTORS["source abc"].digest, VECTORS["processor"].digest
REFIT = refit_pb2.Manifest(
    checksum_algorithm="blake3",
    buckets=[refit_pb2.Bucket(index=0, bytes=64, checksum="ab")],
    tensors=[
        refit_pb2.TensorSpec(
            name="w", dtype="F32", shape=[2], bucket=0, offset=0, bytes=8, changed=True, digest="cd"
        )
    ],
)
REFIT.version.run, REFIT.version.lineage, REFIT.version.number = "r", "main", 3
TABLE = [
    refit_pb2.TensorSpec(name="w", dtype="F32", shape=[2]),
    refit_pb2.TensorSpec(name="b", dtype="BF16", shape=[2, 3]),
]
OURS = {
    "source of nothing": source_digest(b""),
    "source abc": source_digest(b"abc"),
    "source of several chunks": source_digest(bytes(range(16)) * 321),
    "frame of 1 row and 2 columns": frame_digest(WIDE),
    "frame of 2 rows and 1 column": frame_digest(WIDE.reshape(2, 1, 3)),
    "track of 0, 0.5, -1 at 16000 samples a second": track_digest(np.array([0, 0.5, -1], np.float32), 16_000),
    "picture": media_digest(manifest_bytes(MediaKind.IMAGE, [FRAME])),
    "clip of that frame at 0 s and 0.5 s": media_digest(
        manifest_bytes(MediaKind.VIDEO, [FRAME, FRAME], [0, 500_000])
    ),
    "audio": media_digest(manifest_bytes(MediaKind.AUDIO, [TRACK])),
    "alias of source abc as a picture": alias_key(SOURCE, still().as_alias_part()),
    "alias of source abc as a clip": alias_key(SOURCE, clip("nemotron_vl@1", 32, 0.5, 2).as_alias_part()),
    "alias of source abc as a track": alias_key(SOURCE, track().as_alias_part()),
    "processor": processor_fingerprint("P", {"b": [0.5, 1], "a": None}, "transformers 5.18.0"),
    "segment of that clip under that processor": segment_key(CLIP, PROCESSOR),
    "tensors abc": digest_bytes(b"abc", "tensors"),
    "tokens 1, 2, 65536": token_digest([1, 2, 65536]),
    "refit manifest": manifest_digest(REFIT),
    "tensor table": table_digest(TABLE),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_follows_from_the_page_alone(name: str) -> None:
    domain, content, digest = VECTORS[name]
    assert blake3_hex(domain.encode() + b"\n" + content) == digest


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_is_what_the_product_computes(name: str) -> None:
    assert OURS[name] == VECTORS[name].digest


def test_every_kind_of_the_page_has_a_vector() -> None:
    kinds = set(re.findall(r"\| `omnifleet/([a-z-]+)/v1", PAGE))
    assert kinds == {vector.domain.split("/")[1] for vector in VECTORS.values()}


@given(st.binary(max_size=5000))
@settings(max_examples=15, deadline=None)
def test_the_plain_blake3_is_blake3(data: bytes) -> None:
    assert blake3_hex(data) == blake3(data).hexdigest()


def test_a_refit_manifest_is_the_json_of_the_page() -> None:
    assert manifest_json(REFIT) == VECTORS["refit manifest"].content
    child = refit_pb2.Manifest()
    child.CopyFrom(REFIT)
    parent = WeightVersion("r", "main", 2, "ef")
    child.parent.run, child.parent.lineage = parent.run, parent.lineage
    child.parent.number, child.parent.manifest_digest = parent.number, parent.manifest_digest
    assert b'"parent":{"lineage":"main","manifest_digest":"ef","number":2,"run":"r"}' in manifest_json(child)


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


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((1, 3), np.float32), np.zeros(3, np.int16)])
def test_only_canonical_tracks_have_an_address(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32"):
        track_digest(wrong, 16_000)


def test_rate_is_part_of_a_track() -> None:
    samples = np.zeros(4, np.float32)
    assert track_digest(samples, 16_000) != track_digest(samples, 8_000)


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
