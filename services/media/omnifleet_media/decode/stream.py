"""Clips and tracks. Runs in a decoder process (role "clips")."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.frames import Header, Room

_missing = ""


def prepare() -> Header:
    """Import torch, TorchCodec and PyAV; where they are missing, every clip is refused in so many words."""
    global _missing
    try:
        import torch
        import torchcodec

        torch.set_num_threads(1)
        _warm_up()
    except (ImportError, RuntimeError, OSError) as error:  # TorchCodec without FFmpeg raises either
        _missing = str(error).splitlines()[0]
        return {}
    return {"torchcodec": torchcodec.__version__}


def work(header: Header, body: bytearray, room: Room) -> tuple[Header, Sequence[memoryview]]:
    """One clip (`decode.clip.decode_clip`) or, with a `sample_rate`, one track (`decode.track.decode_track`)."""
    if _missing:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"clips and tracks need TorchCodec: {_missing}",
            knob="pip install 'omnifleet-media[video]'",
        )
    from omnifleet_media.decode.clip import decode_clip
    from omnifleet_media.decode.track import decode_track

    if header.get("sample_rate"):
        return decode_track(header, bytes(body))
    return decode_clip(header, bytes(body), room)


def _warm_up() -> None:
    """One clip and one track, both ways: the libraries import the rest of themselves only then, and files are soon out
    of reach."""
    from omnifleet_media.decode.clip import decode_clip
    from omnifleet_media.decode.sequential import read_in_order
    from omnifleet_media.decode.track import decode_track

    clip = _tiny_clip()
    limits = {"pixels": 1 << 16, "frames": 8, "seconds": 60.0, "bytes": 1 << 20, "threads": 1}
    asked = {"sampling": "uniform@1", "num_frames": 0, "fps": 0.0, "temporal_patch": 1, "indices": []}
    decode_clip({**limits, **asked}, clip)
    read_in_order(clip, [0])
    decode_track({"sample_rate": 16_000, "seconds": 1.0}, _tiny_track())


def _tiny_clip() -> bytes:
    """One black frame of 16 x 16 in Matroska."""
    import av
    import numpy as np

    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as sink:
        stream = sink.add_stream("ffv1", rate=1)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "bgr0"
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        sink.mux([*stream.encode(frame.reformat(format="bgr0")), *stream.encode()])
    return out.getvalue()


def _tiny_track() -> bytes:
    """A tenth of a second of silence at 8 kHz in WAV, to be resampled."""
    out = io.BytesIO()
    with wave.open(out, "wb") as sink:
        sink.setnchannels(1)
        sink.setsampwidth(2)
        sink.setframerate(8_000)
        sink.writeframes(bytes(1_600))
    return out.getvalue()
