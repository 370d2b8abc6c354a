"""Clips to frames. Tests named after field cases keep the fault of that case impossible."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

import omnifleet_media.decode.animation
import omnifleet_media.decode.clip
from omnifleet.address import frame_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode import picture
from omnifleet_media.decode.clip import decode_clip
from omnifleet_media.decode.delays import length_s
from omnifleet_media.decode.sequential import read_in_order
from omnifleet_media.ingest.sniff import sniff
from omnifleet_media.sandbox.frames import own_room
from tests.media_files import Pixels, clip, greys, h264, sound

NOTHING_ASKED = {
    "sampling": "uniform@1",
    "num_frames": 0,
    "fps": 0.0,
    "temporal_patch": 1,
    "indices": [],
    "background": "ffffff",
    "threads": 1,
    "pixels": 1 << 24,
    "frames": 512,
    "seconds": 60.0,
    "bytes": 1 << 28,
}
B_FRAMES = h264(greys(24))


class Clip:
    """What a decoder answered."""

    def __init__(self, answer: dict[str, Any], body: memoryview) -> None:
        self.frames = np.frombuffer(body, np.uint8).reshape(answer["frames"], *answer["shape"])
        self.times, self.facts = answer["timestamps_s"], answer["facts"]
        self.indices = [int(i) for i in self.facts["indices"].split(",")]

    @property
    def greys(self) -> list[int]:
        """The one value of each frame; fails if a frame has more than one."""
        assert (self.frames == self.frames[:, :1, :1, :1]).all()
        return [int(v) for v in self.frames[:, 0, 0, 0]]


def decoded(data: bytes, **asked: Any) -> Clip:
    answer, (body,) = decode_clip({**NOTHING_ASKED, **asked}, data)
    return Clip(answer, body)


def picked(data: bytes, *indices: int) -> Clip:
    return decoded(data, sampling="indices@1", indices=list(indices))


def refused(data: bytes, **asked: Any) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        decoded(data, **asked)
    return caught.value


def turned(data: bytes) -> bytes:
    """The same MP4 with a matrix in its track header that players show turned by a quarter."""
    at = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 32 << 16, 0, 1 << 30)
    return data[:at] + matrix + data[at + 36 :]


def trimmed(data: bytes, start_s: float, length_ms: int) -> bytes:
    """The same MP4 with an edit list that starts `start_s` into the track."""
    at = data.index(b"elst") + 4
    version, count, _, begin, rate = struct.unpack(">IIIiI", data[at : at + 20])
    scale = struct.unpack(">I", data[(clock := data.index(b"mdhd") + 16) : clock + 4])[0]
    edit = struct.pack(">IIIiI", version, count, length_ms, begin + round(start_s * scale), rate)
    return data[:at] + edit + data[at + 20 :]


def test_vid_01_times_are_those_of_the_frames_taken() -> None:
    taken = decoded(clip(greys(13), 4), num_frames=5)
    assert taken.indices == [0, 3, 6, 9, 12]
    assert taken.times == [0.0, 0.75, 1.5, 2.25, 3.0]
    assert taken.greys == [0, 30, 60, 90, 120]
    assert float(taken.facts["fps"]) == 4


def test_VID_03_rotation_of_the_container_is_applied() -> None:
    halves = np.zeros((32, 64, 3), np.uint8)
    halves[:, :32], halves[:, 32:] = (255, 0, 0), (0, 0, 255)
    frame = decoded(turned(h264([halves] * 3))).frames[0].astype(int)
    assert frame.shape == (64, 32, 3)
    assert (abs(frame[:30] - (255, 0, 0)) <= 4).all()
    assert (abs(frame[34:] - (0, 0, 255)) <= 4).all()


def test_vid_05_the_last_frames_behind_b_frames_are_there() -> None:
    every = decoded(B_FRAMES)
    assert len(every.greys) == 24
    assert abs(every.greys[-1] - 230) <= 2
    assert every.times[-1] == pytest.approx(2.3)
    assert picked(B_FRAMES, 23).greys == every.greys[-1:]
    error = refused(B_FRAMES, sampling="indices@1", indices=[24])
    assert (error.reason, error.knob) == (Reason.INVALID_REQUEST, "contract.indices")
    assert "0 to 23" in error.message


@pytest.mark.parametrize("indices", [list(range(24)), [11, 12, 13], [23, 0, 12, 12, 5]])
def test_vid_06_a_batch_is_its_single_reads(indices: list[int]) -> None:
    batch = picked(B_FRAMES, *indices)
    single = [picked(B_FRAMES, i) for i in indices]
    assert batch.indices == indices
    assert (batch.frames == np.concatenate([one.frames for one in single])).all()
    assert batch.times == [one.times[0] for one in single]


def test_vid_07_a_cut_clip_is_sampled_over_what_is_there() -> None:
    whole = clip(greys(30))
    assert "truncated" not in decoded(whole).facts
    cut = decoded(whole[: len(whole) * 6 // 10], num_frames=8)
    total = int(cut.facts["total_frames"])
    assert cut.facts["truncated"] == "true"
    assert 8 <= total < 30
    assert cut.indices == [int(i) for i in np.floor(np.linspace(0, total - 1, 8))]
    assert cut.greys == [10 * i % 256 for i in cut.indices]
    assert len(set(cut.indices)) == 8


@pytest.mark.parametrize("part", [0.95, 0.8])
def test_vid_07_a_cut_mp4_is_sampled_over_what_is_there(part: float) -> None:
    whole = h264(greys(24), muxer={"movflags": "+faststart"})
    assert "truncated" not in decoded(whole).facts
    cut = decoded(whole[: int(len(whole) * part)], num_frames=4)
    total = int(cut.facts["total_frames"])
    assert cut.facts["truncated"] == "true"
    assert 4 <= total < 24
    assert cut.indices == [int(i) for i in np.floor(np.linspace(0, total - 1, 4))]
    assert all(abs(value - 10 * i) <= 2 for value, i in zip(cut.greys, cut.indices, strict=True))


def test_the_reference_sampling_recovers_too() -> None:
    whole = h264(greys(24), muxer={"movflags": "+faststart"})
    cut = decoded(whole[: int(len(whole) * 0.8)], sampling="nemotron_vl@1", num_frames=8, temporal_patch=2)
    total = int(cut.facts["total_frames"])
    n = min(8, total) - min(8, total) % 2
    assert cut.indices == [round(x) for x in np.linspace(0, (total - 1) / 10, n) * 10]


@pytest.mark.parametrize("data", [b"", B_FRAMES[:200], b"\0\0\0\x18ftypisom" + bytes(64)])
def test_vid_09_nothing_to_see_is_refused(data: bytes) -> None:
    assert refused(data).reason is Reason.INVALID_MEDIA


def test_vid_09_a_header_without_pictures_is_refused() -> None:
    whole = h264(greys(24), muxer={"movflags": "+faststart"})
    assert refused(whole[: whole.index(b"mdat") + 4]).reason is Reason.INVALID_MEDIA


def test_vid_09_near_empty_clips_have_at_least_one_frame() -> None:
    assert decoded(clip(greys(1)), temporal_patch=2).greys == [0]
    assert decoded(h264(greys(1)), sampling="nemotron_vl@1", temporal_patch=2).indices == [0, 0]
    assert len(decoded(clip(greys(2), 30), fps=1, temporal_patch=2).indices) == 1
    assert len(decoded(clip(greys(2), 30), sampling="nemotron_vl@1", fps=1, temporal_patch=2).indices) == 2


def test_vid_11_sound_alone_is_no_clip() -> None:
    error = refused(sound(np.zeros((1, 44_100), np.float32), 44_100, codec="aac", container="mp4"))
    assert error.reason is Reason.INVALID_MEDIA
    assert "no_video_stream" in error.message


def test_vid_13_odd_widths_have_no_padding() -> None:
    taken = decoded(clip(greys(5, (65, 49))))
    assert taken.frames.shape[1:] == (49, 65, 3)
    assert taken.greys == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(
    ("asked", "count"),
    [({"num_frames": 16}, 16), ({"num_frames": 4, "fps": 1.0}, 4), ({"num_frames": 16, "fps": 1.0}, 10)],
)
@pytest.mark.parametrize("sampling", ["uniform@1", "nemotron_vl@1"])
def test_vid_15_counts_and_times_agree(sampling: str, asked: dict[str, Any], count: int) -> None:
    taken = decoded(THREE_HUNDRED, sampling=sampling, temporal_patch=2, **asked)
    assert len(taken.frames) == len(taken.times) == len(taken.indices) == count


THREE_HUNDRED = clip(greys(300, (16, 16)), 30)


def test_hsh_07_the_same_clip_with_other_counts_is_another_list() -> None:
    eight, sixteen = (decoded(THREE_HUNDRED, num_frames=n) for n in (8, 16))
    assert (len(eight.frames), len(sixteen.frames)) == (8, 16)


def test_hsh_13_times_differ_and_frames_do_not() -> None:
    slow, fast = (decoded(clip(greys(10), fps), num_frames=4) for fps in (5, 10))
    assert [frame_digest(f) for f in slow.frames] == [frame_digest(f) for f in fast.frames]
    assert slow.times == pytest.approx([0, 0.6, 1.2, 1.8])
    assert fast.times == pytest.approx([0, 0.3, 0.6, 0.9])


def test_variable_rates_keep_their_own_times_from_the_first_frame() -> None:
    taken = decoded(clip(greys(6), at=[500, 600, 650, 900, 1400, 1500]))
    assert taken.times == pytest.approx([0, 0.1, 0.15, 0.4, 0.9, 1.0])
    assert "truncated" not in taken.facts
    assert taken.greys == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize("start", [0.0, 0.5, 1.2])
def test_an_edit_list_shows_what_players_show(start: float) -> None:
    """A start between two key frames: TorchCodec alone answers later frames under these indices."""
    first = round(start * 10)
    taken = decoded(trimmed(B_FRAMES, start, 1000))
    assert [abs(v - 10 * (first + i)) <= 2 for i, v in enumerate(taken.greys)] == [True] * 10
    assert taken.times == pytest.approx([i / 10 for i in range(10)])
    late = picked(trimmed(B_FRAMES, start, 1000), 3)
    assert late.greys == taken.greys[3:4]
    assert late.times == pytest.approx([0.3])


def test_reading_in_order_is_what_seeking_gives() -> None:
    frames, seconds = read_in_order(turned(B_FRAMES), [3, 0, 3])
    seeked = picked(turned(B_FRAMES), 3, 0, 3)
    assert frames.shape == seeked.frames.shape
    assert (abs(frames.astype(int) - seeked.frames) <= 1).all()
    assert seconds == seeked.times
    with pytest.raises(IndexError):
        read_in_order(B_FRAMES, [24])


@pytest.mark.parametrize(
    ("limit", "knob"),
    [
        ({"frames": 4}, "media.limits.frames"),
        ({"pixels": 64 * 48 - 1}, "media.limits.pixels"),
        ({"bytes": 24 * 64 * 48 * 3 - 1}, "media.limits.decode_memory_bytes"),
        ({"seconds": 2.3}, "media.limits.seconds"),
        ({"seconds": 2.3, "num_frames": 1}, "media.limits.seconds"),
    ],
)
def test_limits_are_checked_before_the_frames(
    limit: dict[str, float], knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(omnifleet_media.decode.clip, "_take", None)  # no frame is decoded
    error = refused(B_FRAMES, **limit)
    assert (error.reason, error.knob) == (Reason.LIMIT_EXCEEDED, knob)


def test_the_length_of_a_clip_is_that_of_its_pictures() -> None:
    """A container that promises hours is not refused for them, and one that conceals them is not taken for it."""
    assert len(decoded(B_FRAMES, seconds=2.4).frames) == 24
    whole = h264(greys(24), muxer={"movflags": "+faststart"})
    cut = decoded(whole[: int(len(whole) * 0.8)], seconds=2.39)
    assert cut.facts["truncated"] == "true"
    assert len(cut.frames) < 24
    assert decoded(promising(B_FRAMES, 10 * 3600), seconds=2.4, num_frames=2).indices == [0, 23]
    assert refused(promising(B_FRAMES, 1), seconds=2.3).knob == "media.limits.seconds"
    sparse = clip(greys(3), at=[0, 1_000, 7_200_000])
    assert refused(sparse, seconds=3600.0, num_frames=1).knob == "media.limits.seconds"


def promising(data: bytes, seconds: int) -> bytes:
    """The same MP4 whose headers of film, track and stream all say this length."""
    for box, scale_at, length_at in ((b"mvhd", 12, 16), (b"tkhd", None, 20), (b"mdhd", 12, 16)):
        at = data.index(box) + 4
        if scale_at is not None:
            scale = struct.unpack(">I", data[at + scale_at : at + scale_at + 4])[0]
        data = data[: at + length_at] + struct.pack(">I", seconds * scale) + data[at + length_at + 4 :]
    return data


@pytest.mark.parametrize(
    "playlist", [b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", b"ffconcat version 1.0\nfile x\n"]
)
def test_sec_06_playlists_that_name_other_sources_are_no_clips(playlist: bytes) -> None:
    with pytest.raises(OmnifleetError):
        sniff(playlist)
    assert refused(playlist).reason is Reason.INVALID_MEDIA


# ---------------------------------------------------------------------- animations in a video slot


def animation(codec: str, frames: list[Pixels], durations: list[int], **options: Any) -> bytes:
    out = io.BytesIO()
    first, *rest = [Image.fromarray(f) for f in frames]
    first.save(out, codec, save_all=True, append_images=rest, duration=durations, loop=0, **options)
    return out.getvalue()


def colours(*values: tuple[int, int, int]) -> list[Pixels]:
    return [np.full((2, 2, 3), value, np.uint8) for value in values]


RGB = colours((255, 0, 0), (0, 255, 0), (0, 0, 255))


def played(data: bytes, **asked: Any) -> Clip:
    header = {**NOTHING_ASKED, "codec": sniff(data).codec, **asked}
    answer, (body,) = picture.work(header, bytearray(data), own_room)
    return Clip(answer, body)


@pytest.mark.parametrize(
    ("codec", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("AVIF", {"quality": 100})]
)
def test_img_08_an_animation_in_a_video_slot_is_all_its_frames(codec: str, options: dict[str, Any]) -> None:
    data = animation(codec, RGB, [100, 300, 100], **options)
    assert sniff(data).animates
    taken = played(data)
    assert (abs(taken.frames.astype(int) - np.stack(RGB)) <= 3).all()
    assert taken.times == pytest.approx([0, 0.1, 0.4])
    assert played(data, sampling="indices@1", indices=[2, 0]).times == pytest.approx([0.4, 0])
    assert len(played(data, num_frames=2, temporal_patch=2).frames) == 2


def test_img_08_in_a_picture_slot_it_is_frame_0_whatever_ran_before() -> None:
    data = animation("GIF", RGB, [100, 300, 100])
    still = frame_digest(RGB[0])
    for _ in range(5):
        assert frame_digest(picture.decode_picture(data, "GIF", 1 << 20)) == still
        assert frame_digest(played(data).frames[2]) == frame_digest(RGB[2])


def test_frames_of_an_animation_are_composed() -> None:
    """The second frame only changes one corner; what lies under it stays."""
    under, corner = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3), np.uint8)
    under[:], corner[:] = (255, 0, 0), (255, 0, 0)
    corner[0, 0] = (0, 0, 255)
    assert (played(animation("GIF", [under, corner], [50, 50])).frames[1] == corner).all()


def test_no_duration_is_a_tenth_of_a_second() -> None:
    assert played(animation("GIF", RGB, [0, 0, 0])).times == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(("codec", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("AVIF", {})])
def test_a_still_picture_does_not_animate(codec: str, options: dict[str, Any]) -> None:
    out = io.BytesIO()
    Image.fromarray(RGB[0]).save(out, codec, **options)
    assert not sniff(out.getvalue()).animates


def test_an_animation_has_limits() -> None:
    data = animation("GIF", RGB, [10, 10, 10])
    for limit, knob in (
        ({"frames": 2}, "frames"),
        ({"bytes": 35}, "decode_memory_bytes"),
        ({"pixels": 3}, "pixels"),
        ({"seconds": 0.29}, "seconds"),
        ({"seconds": 0.29, "num_frames": 1}, "seconds"),
    ):
        with pytest.raises(OmnifleetError) as caught:
            played(data, **limit)
        assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, f"media.limits.{knob}")


@pytest.mark.parametrize(("codec", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_the_length_of_an_animation_is_known_before_its_pixels(
    codec: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = animation(codec, RGB, [100, 3000, 0], **options)
    assert length_s(codec, data) == pytest.approx(3.2)
    assert played(data, seconds=3.2).times == pytest.approx([0, 0.1, 3.1])
    assert all(length_s(codec, data[:cut]) <= 3.2 for cut in range(0, len(data), 7))
    monkeypatch.setattr(omnifleet_media.decode.animation, "_starts", None)  # no frame is decoded
    with pytest.raises(OmnifleetError) as caught:
        played(data, seconds=3.1)
    assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.seconds")


def test_an_animation_whose_headers_say_nothing_ends_at_the_limit() -> None:
    data = animation("AVIF", RGB, [1000, 1000, 1000], quality=100)
    assert played(data, seconds=3.0).times == pytest.approx([0, 1, 2])
    with pytest.raises(OmnifleetError) as caught:
        played(data, seconds=2.9)
    assert caught.value.knob == "media.limits.seconds"
