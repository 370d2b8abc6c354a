"""Small clips and tracks for tests, written with PyAV."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def greys(count: int, size: tuple[int, int] = (64, 48), step: int = 10) -> list[Pixels]:
    """Frame i of (width, height) is solid grey `step` x i, modulo 256."""
    return [np.full((size[1], size[0], 3), step * i % 256, np.uint8) for i in range(count)]


def clip(
    frames: Iterable[Pixels],
    fps: float = 10,
    *,
    codec: str = "ffv1",
    pixel_format: str = "bgr0",
    container: str = "matroska",
    options: Mapping[str, str] | None = None,
    bframes: int = 0,
    at: Sequence[int] | None = None,
    muxer: Mapping[str, str] | None = None,
) -> bytes:
    """A clip. at: ticks of 1 ms of each frame, for variable rates; else frame i is shown at i / fps."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 -- some muxers read back what they wrote
    with file, av.open(file.name, "w", format=container, options=dict(muxer or {})) as sink:
        stream: Any = sink.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=dict(options or {})
        )
        stream.pix_fmt = pixel_format
        if at is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if bframes:
            stream.codec_context.max_b_frames = bframes
        for i, pixels in enumerate(frames):
            if i == 0:
                stream.height, stream.width = pixels.shape[:2]
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            picture = picture.reformat(format=pixel_format, dst_colorspace="itu601")
            if at is not None:
                picture.pts, picture.time_base = at[i], Fraction(1, 1000)
            sink.mux(stream.encode(picture))
        sink.mux(stream.encode())
        sink.close()
        return Path(file.name).read_bytes()


def h264(frames: Iterable[Pixels], fps: float = 10, **settings: Any) -> bytes:
    """An H.264 clip in MP4 with B-frames and a key frame every 12."""
    options = {"qp": "0", "bf": "2", "g": "12", "x264-params": "bframes=2:keyint=12:qp=0:log-level=none"}
    return clip(
        frames, fps, codec="libx264", pixel_format="yuv420p", container="mp4", options=options, **settings
    )


def sound(
    samples: npt.NDArray[np.float32], rate: int, *, codec: str = "pcm_s16le", container: str = "wav"
) -> bytes:
    """Samples float32 [channels, N] in -1..1 as a file."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as sink:
        layout = "mono" if samples.shape[0] == 1 else "stereo"
        stream: Any = sink.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            stream.format, layout, rate, frame_size=stream.codec_context.frame_size or 0
        )
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            sink.mux(stream.encode(piece))
        sink.mux(stream.encode())
    return out.getvalue()
