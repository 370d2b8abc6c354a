"""Clips to canonical frames with TorchCodec. Runs in a decoder process (role "clips")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode.sampling import frame_indices
from omnifleet_media.sandbox.frames import Header

_missing = ""


def prepare() -> Header:
    """Import torch and TorchCodec; where they are missing, every clip is refused in so many words."""
    global _missing
    try:
        import torch
        import torchcodec
    except (ImportError, RuntimeError, OSError) as error:  # TorchCodec without FFmpeg raises either
        _missing = str(error).splitlines()[0]
        return {}
    torch.set_num_threads(1)
    return {"torchcodec": torchcodec.__version__}


def work(header: Header, body: bytearray) -> tuple[Header, Sequence[memoryview]]:
    """header: sampling, num_frames, fps, temporal_patch, limits pixels and frames. Answers frames, shape, timestamps_s."""
    if _missing:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"clips need TorchCodec: {_missing}",
            knob="pip install 'omnifleet-media[video]'",
        )
    data = bytes(body)
    decoder = _open(data)
    total, fps = _checked(decoder.metadata, header)
    try:
        batch = decoder.get_frames_at(indices=_indices(header, total, fps))
    except (RuntimeError, IndexError):
        total = _decodable(data, total)  # the container promises more frames than there are
        if total == 0:
            raise OmnifleetError(Reason.INVALID_MEDIA, "no frame of the clip can be decoded") from None
        batch = _open(data).get_frames_at(indices=_indices(header, total, fps))
    frames = np.ascontiguousarray(batch.data.numpy())
    start = float(decoder.metadata.begin_stream_seconds or 0.0)
    answer = {
        "frames": int(frames.shape[0]),
        "shape": list(frames.shape[1:]),
        "timestamps_s": [round(float(pts) - start, 6) for pts in batch.pts_seconds],
        "facts": {"total_frames": str(total), "fps": f"{fps:g}"},
    }
    return answer, [frames.data.cast("B")]


def _open(data: bytes) -> Any:
    from torchcodec.decoders import VideoDecoder

    try:
        return VideoDecoder(
            data, dimension_order="NHWC", device="cpu", seek_mode="exact", num_ffmpeg_threads=0
        )
    except (RuntimeError, ValueError) as error:
        raise OmnifleetError(
            Reason.INVALID_MEDIA, f"the clip has no video stream that can be read: {error}"
        ) from error


def _checked(metadata: Any, header: Header) -> tuple[int, float]:
    total, fps = metadata.num_frames, metadata.average_fps
    if not total or not fps:
        raise OmnifleetError(Reason.INVALID_MEDIA, "the clip has no frames or no frame rate")
    if metadata.width * metadata.height > header["pixels"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"frames are {metadata.width} x {metadata.height}, at most {header['pixels']} pixels are allowed",
            knob="media.limits.pixels",
        )
    return int(total), float(fps)


def _indices(header: Header, total: int, fps: float) -> list[int]:
    indices = frame_indices(
        header["sampling"], total, fps, header["num_frames"], header["fps"], header["temporal_patch"]
    )
    if len(indices) > header["frames"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"{len(indices)} frames are asked for, at most {header['frames']} are allowed",
            knob="media.limits.frames",
        )
    return indices


def _decodable(data: bytes, total: int) -> int:
    """Frames up to the last that decodes, by halving; each probe with a fresh decoder, since a failed one is spoilt."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        try:
            _open(data).get_frames_at(indices=[middle])
        except (RuntimeError, IndexError):
            high = middle
        else:
            low = middle + 1
    return low
