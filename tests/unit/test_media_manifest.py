"""Frame manifests: the reference's are read, ours are written, and files count rather than names."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode import picture
from omnifleet_media.ingest.frame_manifest import MAGIC, MIME, FrameManifest, bundle, open_bundle
from omnifleet_media.ingest.sniff import sniff
from omnifleet_media.ingest.source import Intake
from omnifleet_media.sandbox.frames import own_room
from omnifleet_media.server.cached_frames import with_files

# Written out by hand as the reference writes it: compact JSON behind a magic line, in base64.
REFERENCE_JSON = (
    '{"frame_paths":["%s/0.png","%s/1.png"],"metadata":{"fps":1.0,"duration":2.0,"total_num_frames":2,'
    '"frames_indices":[0,1],"video_backend":"cached_png_sequence","do_sample_frames":false}}'
)
LIMIT = 1 << 20
ASKED = {
    "codec": "frames",
    "sampling": "nemotron_vl@1",
    "num_frames": 0,
    "fps": 0.0,
    "temporal_patch": 2,
    "indices": [],
    "background": "ffffff",
    "pixels": 1 << 20,
    "frames": 64,
    "seconds": 60.0,
    "bytes": 1 << 24,
}


def png(value: int, size: tuple[int, int] = (4, 3)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(out, "PNG")
    return out.getvalue()


def reference(folder: Path) -> bytes:
    return MAGIC + (REFERENCE_JSON % (folder, folder)).encode()


def from_disk(path: str) -> bytes:
    return Path(path).read_bytes()


def decoded(data: bytes, **asked: Any) -> tuple[dict[str, Any], np.ndarray]:
    answer, (body,) = picture.work({**ASKED, **asked}, bytearray(data), own_room)
    return answer, np.frombuffer(body, np.uint8).reshape(answer["frames"], *answer["shape"])


def refused(data: bytes) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        FrameManifest.parse(data)
    return caught.value


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(png(100 * i))
    return tmp_path


def test_a_manifest_of_the_reference_is_read(two: Path) -> None:
    manifest = FrameManifest.parse(reference(two))
    assert manifest == FrameManifest((f"{two}/0.png", f"{two}/1.png"), 1.0, 2.0, 2, (0, 1))


def test_ours_is_the_reference_s_byte_for_byte(two: Path) -> None:
    assert FrameManifest.of([two / "0.png", two / "1.png"]).encode() == reference(two)


@given(st.lists(st.from_regex(r"/[a-z]{1,8}/[a-z0-9 ü]{1,8}\.png", fullmatch=True), min_size=1, max_size=40))
def test_what_is_written_is_read_back(paths: list[str]) -> None:
    manifest = FrameManifest.of(paths)
    assert FrameManifest.parse(manifest.encode()) == manifest
    head, _, body = manifest.data_url().partition(",")
    assert head == f"data:{MIME};base64"
    assert base64.b64decode(body) == manifest.encode()


def test_every_frame_is_kept_a_second_apart(two: Path) -> None:
    data = bundle(FrameManifest.parse(reference(two)), from_disk, LIMIT)
    for sampling in ("nemotron_vl@1", "uniform@1"):
        answer, frames = decoded(data, sampling=sampling)
        assert [int(f.max()) for f in frames] == [0, 100]
        assert answer["timestamps_s"] == [0.0, 1.0]
        assert answer["facts"]["indices"] == "0,1"


def test_other_rates_are_read_too(two: Path) -> None:
    body = json.loads(reference(two)[len(MAGIC) :])
    body["metadata"] |= {"fps": 29.97, "frames_indices": [0, 30], "total_num_frames": 300, "duration": 10}
    data = bundle(FrameManifest.parse(MAGIC + json.dumps(body).encode()), from_disk, LIMIT)
    assert decoded(data)[0]["timestamps_s"] == [0.0, 0.99]
    assert decoded(data, sampling="uniform@1")[0]["timestamps_s"] == pytest.approx([0.0, 30 / 29.97])


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("frame_paths", [], "names no frames"),
        ("frame_paths", "x", "names no frames"),
        ("frame_paths", ["/a.png", 3], "no text"),
        ("frame_paths", ["/a.png", ""], "no text"),
        ("frame_paths", ["/a.png", "b.png"], "absolute"),
        ("frame_paths", ["/a.png", "https://host/b.png"], "absolute"),
        ("metadata", None, "no metadata"),
        ("fps", 0, "fps"),
        ("fps", "1", "fps"),
        ("fps", True, "fps"),
        ("total_num_frames", 0, "total_num_frames"),
        ("frames_indices", [0], "2 frames and 1"),
        ("frames_indices", [0, -1], "whole numbers"),
        ("frames_indices", [0, 1.5], "whole numbers"),
    ],
)
def test_what_the_reference_refuses_is_refused(part: str, value: Any, words: str) -> None:
    body = json.loads((REFERENCE_JSON % ("/a", "/a")).encode())
    (body if part in body else body["metadata"])[part] = value
    error = refused(MAGIC + json.dumps(body).encode())
    assert error.reason is Reason.INVALID_MEDIA
    assert words in error.message


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + b"[]", MAGIC + b"{", b"{}"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    assert refused(data).reason is Reason.INVALID_MEDIA


def test_the_number_of_frames_must_be_the_one_asked_for(two: Path) -> None:
    data = bundle(FrameManifest.parse(reference(two)), from_disk, LIMIT)
    assert decoded(data, num_frames=2)[0]["frames"] == 2
    with pytest.raises(OmnifleetError, match="2 frames and 4 are asked") as caught:
        decoded(data, num_frames=4)
    assert caught.value.knob == "contract.num_frames"


def test_frames_of_one_clip_have_one_size(two: Path) -> None:
    (two / "1.png").write_bytes(png(9, (5, 3)))
    with pytest.raises(OmnifleetError, match="one size"):
        decoded(bundle(FrameManifest.parse(reference(two)), from_disk, LIMIT))


def test_a_bundle_is_its_files_not_their_names(two: Path) -> None:
    manifest = FrameManifest.parse(reference(two))
    before = bundle(manifest, from_disk, LIMIT)
    assert str(two).encode() not in before
    (two / "1.png").write_bytes(png(50))
    assert bundle(manifest, from_disk, LIMIT) != before
    timing, files = open_bundle(before)
    assert [bytes(file) for file in files] == [png(0), png(100)]
    assert (timing.fps, timing.frames_indices) == (1.0, (0, 1))


def test_a_bundle_is_limited(two: Path) -> None:
    with pytest.raises(OmnifleetError) as caught:
        bundle(FrameManifest.parse(reference(two)), from_disk, 2 * len(png(0)) - 1)
    assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.source_bytes")
    data = bundle(FrameManifest.parse(reference(two)), from_disk, LIMIT)
    for limit in ({"frames": 1}, {"bytes": 2 * 36 - 1}, {"pixels": 11}, {"seconds": 0.9}):
        with pytest.raises(OmnifleetError) as caught:
            decoded(data, **limit)
        assert caught.value.reason is Reason.LIMIT_EXCEEDED


@pytest.mark.parametrize("cut", [-1, 25, 20])
def test_a_cut_bundle_is_refused(two: Path, cut: int) -> None:
    data = bundle(FrameManifest.parse(reference(two)), from_disk, LIMIT)
    with pytest.raises(OmnifleetError) as caught:
        open_bundle(data[:cut])
    assert caught.value.reason is Reason.INVALID_MEDIA


async def test_files_are_read_under_the_allowed_folders_only(two: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    intake = Intake(MediaLimits())
    intake.add(FrameManifest.of([two / "0.png", two / "1.png"]).data_url().encode())
    source = intake.finish()
    assert source.type.mime == MIME
    found = await with_files(source, (two,), LIMIT)
    assert found.type.codec == "frames"
    assert decoded(found.data)[0]["frames"] == 2
    for roots in ((), (elsewhere,)):
        with pytest.raises(OmnifleetError) as caught:
            await with_files(source, roots, LIMIT)
        assert caught.value.knob == "media.sources.roots"
    (elsewhere / "2.png").write_bytes(png(7))
    (two / "1.png").unlink()
    (two / "1.png").symlink_to(elsewhere / "2.png")
    with pytest.raises(OmnifleetError):
        await with_files(source, (two,), LIMIT)


def test_sniffing() -> None:
    assert sniff(MAGIC).mime == MIME
