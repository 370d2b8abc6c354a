"""Clips to canonical frames with TorchCodec."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchcodec.decoders import VideoDecoder

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode.sampling import check_length, frame_indices, prompt_clock
from omnifleet_media.decode.sequential import promised_seconds, read_in_order
from omnifleet_media.sandbox.frames import Header, Room, own_room

Pixels = npt.NDArray[np.uint8]
log = logging.getLogger("omnifleet.media")

_SLACK = 1.5  # frames that a container's length may be longer than its pictures
_UNREADABLE = (RuntimeError, IndexError, ValueError)


@dataclass(frozen=True, slots=True)
class Taken:
    """Frames of `shape` (H, W, 3), one after the other, and the second at which each is shown, from the clip's first frame."""

    frames: memoryview
    shape: list[int]
    seconds: list[float]


def decode_clip(header: Header, data: bytes, room: Room = own_room) -> tuple[Header, Sequence[memoryview]]:
    """header: sampling, num_frames, fps, temporal_patch, indices, threads; limits pixels, frames, seconds and bytes.

    Answers frames, shape, timestamps_s and facts. A clip that ends before its container says is sampled anew over the
    frames that can be decoded, and the fact `truncated` says so.
    """
    decoder = _open(data, header["threads"])
    total, fps = _checked(decoder.metadata, header)
    short = _promises_more(decoder.metadata, data, total, fps)
    indices = _indices(header, total, fps)
    try:
        taken = _take(decoder, data, indices, room)
    except _UNREADABLE:
        total, short = _decodable(data, total, header["threads"]), True
        log.warning("the clip ends early: %d frames can be decoded", total)
        if total == 0:
            raise OmnifleetError(Reason.INVALID_MEDIA, "no frame of the clip can be decoded") from None
        indices = _indices(header, total, fps)
        taken = _take_what_is_there(data, indices, header["threads"], room)
    by_prompt = header["sampling"].startswith("nemotron_vl")
    facts = {"total_frames": str(total), "fps": f"{fps:.9g}", "indices": ",".join(map(str, indices))}
    answer = {
        "frames": len(indices),
        "shape": taken.shape,
        "timestamps_s": prompt_clock(indices, fps) if by_prompt else taken.seconds,
        "facts": facts | ({"truncated": "true"} if short else {}),
    }
    return answer, [taken.frames]


def _open(data: bytes, threads: int) -> VideoDecoder:
    try:
        return VideoDecoder(
            data, dimension_order="NHWC", device="cpu", seek_mode="exact", num_ffmpeg_threads=threads
        )
    except ValueError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, "no_video_stream: the file has no video stream") from error
    except RuntimeError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the clip cannot be read: {_cause(error)}") from error


def _checked(metadata: Any, header: Header) -> tuple[int, float]:
    """(frames, frames a second). Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED."""
    total, fps = metadata.num_frames, metadata.average_fps
    if total == 1 and not fps:
        fps = 1.0  # one picture has no rate
    if not total or not fps:
        raise OmnifleetError(Reason.INVALID_MEDIA, "the clip has no frames or no frame rate")
    if metadata.width * metadata.height > header["pixels"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"frames are {metadata.width} x {metadata.height}, at most {header['pixels']} pixels are allowed",
            knob="media.limits.pixels",
        )
    check_length(_seconds(metadata, total, fps), header["seconds"])
    header["frame_bytes"] = metadata.width * metadata.height * 3
    return int(total), float(fps)


def _seconds(metadata: Any, total: int, fps: float) -> float:
    """Length by the packets that are there: what a container says beyond them costs nothing and counts for nothing."""
    begin, end = metadata.begin_stream_seconds_from_content, metadata.end_stream_seconds_from_content
    return float(end) - float(begin) if begin is not None and end is not None else total / fps


def _promises_more(metadata: Any, data: bytes, total: int, fps: float) -> bool:
    """True if the container says that the stream is longer than its packets (an edit list shortens both alike)."""
    promised, seconds = metadata.num_frames_from_header, metadata.duration_seconds_from_header
    if not promised or not seconds:
        return promised_seconds(data) - float(metadata.end_stream_seconds_from_content or 0) > _SLACK / fps
    return bool(promised > total and seconds * fps > total + _SLACK)


def _indices(header: Header, total: int, fps: float) -> list[int]:
    """The frames to take, checked before anything is allocated for them."""
    indices = frame_indices(
        header["sampling"],
        total,
        fps,
        header["num_frames"],
        header["fps"],
        header["temporal_patch"],
        header["indices"],
    )
    if len(indices) > header["frames"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"{len(indices)} frames are asked for, at most {header['frames']} are allowed",
            knob="media.limits.frames",
        )
    if len(indices) * header["frame_bytes"] > header["bytes"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"{len(indices)} frames have {len(indices) * header['frame_bytes']} bytes, "
            f"at most {header['bytes']} are allowed",
            knob="media.limits.decode_memory_bytes",
        )
    return indices


def _take(decoder: VideoDecoder, data: bytes, indices: list[int], room: Room) -> Taken:
    """The frames, from TorchCodec or, where it would seek past them, in order from the start.

    One after the other, each put where it belongs while it is in the processor's cache.
    """
    begin = float(decoder.metadata.begin_stream_seconds or 0.0)
    at, frame = 0, decoder.get_frame_at(0)
    # A stream whose first key frame is cut off by an edit list can't be seeked into: TorchCodec then answers a later
    # frame under an earlier index. The time of frame 0 tells.
    if round(float(frame.pts_seconds) - begin, 6) > 0:
        frames, times = read_in_order(data, indices)
        return Taken(np.ascontiguousarray(frames).data.cast("B"), list(frames.shape[1:]), times)
    shape = list(frame.data.shape)
    body = room(len(indices) * frame.data.numel())
    pixels = np.frombuffer(body, np.uint8).reshape(len(indices), *shape)
    seconds = [0.0] * len(indices)
    for place in sorted(range(len(indices)), key=indices.__getitem__):
        if indices[place] != at:
            at, frame = indices[place], decoder.get_frame_at(indices[place])
        pixels[place] = frame.data.numpy()
        seconds[place] = round(float(frame.pts_seconds) - begin, 6)
    return Taken(body, shape, seconds)


def _take_what_is_there(data: bytes, indices: list[int], threads: int, room: Room) -> Taken:
    """As `_take` with a fresh decoder, then each frame with one of its own: a failure spoils its decoder."""
    try:
        return _take(_open(data, threads), data, indices, room)
    except _UNREADABLE:
        single = [_take(_open(data, threads), data, [i], own_room) for i in indices]
        return Taken(
            memoryview(b"".join(s.frames for s in single)), single[0].shape, [s.seconds[0] for s in single]
        )


def _decodable(data: bytes, total: int, threads: int) -> int:
    """Frames up to the last that decodes, by halving; each probe with a fresh decoder, since a failed one is spoilt."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        try:
            _open(data, threads).get_frames_at(indices=[middle])
        except _UNREADABLE:
            high = middle
        else:
            low = middle + 1
    return low


def _cause(error: Exception) -> str:
    """TorchCodec's own words, without its source file and line."""
    return str(error).splitlines()[0].rsplit(".cpp:", 1)[-1].partition(", ")[2] or str(error).splitlines()[0]
