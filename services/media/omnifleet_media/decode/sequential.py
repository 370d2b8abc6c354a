"""Clips from their first packet on with PyAV, for streams that TorchCodec can't seek in.

A clip trimmed without encoding has an edit list that starts between two key frames. TorchCodec 0.13 drops the key frame
with the packets before the edit and then seeks to the next one, which gives wrong frames and no error. Reading in order
needs no seek; it costs the decoding of what lies before the last frame asked for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import av
import numpy as np
import numpy.typing as npt

from omnifleet.errors import OmnifleetError, Reason

Pixels = npt.NDArray[np.uint8]


def read_in_order(data: bytes, indices: Sequence[int]) -> tuple[Pixels, list[float]]:
    """Frames uint8 RGB (F, H, W, 3) by index in order of showing, and their seconds from the first frame.

    Raises IndexError if the clip ends before the last of them, OmnifleetError(INVALID_MEDIA) if it can't be read.
    """
    wanted = set(indices)
    found: dict[int, tuple[Pixels, float]] = {}
    try:
        with av.open(io.BytesIO(data)) as container:
            begin: float | None = None
            for i, frame in enumerate(container.decode(video=0)):
                begin = frame.time if begin is None else begin
                if i in wanted:
                    found[i] = (_upright(frame), round(float(frame.time or 0.0) - float(begin or 0.0), 6))
                if len(found) == len(wanted):
                    break
    except av.FFmpegError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the clip cannot be read: {error}") from error
    if len(found) < len(wanted):
        raise IndexError(f"the clip has fewer than {max(wanted) + 1} frames")
    return np.stack([found[i][0] for i in indices]), [found[i][1] for i in indices]


def promised_seconds(data: bytes) -> float:
    """Length that the container claims, for one that holds a single stream; 0 where it says nothing or holds more.

    TorchCodec tells the length of a stream, which Matroska does not write.
    """
    try:
        with av.open(io.BytesIO(data)) as container:
            return float(container.duration or 0) / av.time_base if len(container.streams) == 1 else 0.0
    except av.FFmpegError:
        return 0.0


def _upright(frame: av.VideoFrame) -> Pixels:
    """RGB with the container's rotation applied, which PyAV gives as degrees counter-clockwise."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
