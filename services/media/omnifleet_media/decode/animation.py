"""Animated pictures in a video slot: all frames with their durations, as a viewer composes them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode.delays import length_s, shown_ms
from omnifleet_media.decode.picture import Pixels, canonical, open_picture
from omnifleet_media.decode.sampling import check_length, frame_indices, prompt_clock
from omnifleet_media.sandbox.frames import Header


def decode_animation(header: Header, data: bytes) -> tuple[Header, Sequence[memoryview]]:
    """header: as of a clip, and codec and background. Answers frames, shape, timestamps_s and facts.

    Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED; and what Pillow raises on damaged files.
    """
    with open_picture(io.BytesIO(data), header["codec"], header["pixels"]) as picture:
        total = int(getattr(picture, "n_frames", 1))
        if total > header["frames"] and header["num_frames"] == 0:
            raise _too_many(total, header["frames"])
        check_length(length_s(header["codec"], data), header["seconds"])
        starts, length = _starts(picture, total, header["seconds"])
        fps = total / length
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
            raise _too_many(len(indices), header["frames"])
        _check_bytes(picture, indices, header["bytes"])
        shown = dict(_shown(picture, set(indices), header["background"]))
    frames = np.stack([shown[i] for i in indices])
    by_prompt = header["sampling"].startswith("nemotron_vl")
    answer = {
        "frames": len(indices),
        "shape": list(frames.shape[1:]),
        "timestamps_s": prompt_clock(indices, fps) if by_prompt else [starts[i] for i in indices],
        "facts": {"total_frames": str(total), "fps": f"{fps:.9g}", "indices": ",".join(map(str, indices))},
    }
    return answer, [frames.data.cast("B")]


def _starts(picture: Image.Image, total: int, limit: float) -> tuple[list[float], float]:
    """Second at which each frame starts, and the length of the animation. Stops at the frame that is beyond the limit."""
    starts, now = [], 0.0
    for i in range(total):
        picture.seek(i)
        picture.load()  # some codecs know a frame's duration only then
        starts.append(round(now / 1000, 6))
        now += shown_ms(float(picture.info.get("duration") or 0.0))
        check_length(now / 1000, limit)
    return starts, now / 1000


def _shown(picture: Image.Image, wanted: set[int], background: str) -> Iterator[tuple[int, Pixels]]:
    for i in range(max(wanted) + 1):
        picture.seek(i)
        picture.load()
        if i in wanted:
            yield i, canonical(picture, background)


def _check_bytes(picture: Image.Image, indices: Sequence[int], limit: int) -> None:
    size = len(indices) * picture.width * picture.height * 3
    if size > limit:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"{len(indices)} frames have {size} bytes, at most {limit} are allowed",
            knob="media.limits.decode_memory_bytes",
        )


def _too_many(count: int, limit: int) -> OmnifleetError:
    return OmnifleetError(
        Reason.LIMIT_EXCEEDED,
        f"{count} frames are asked for, at most {limit} are allowed",
        knob="media.limits.frames",
    )
