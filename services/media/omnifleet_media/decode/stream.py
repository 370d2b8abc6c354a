"""Clips and tracks. Runs in a decoder process (role "clips")."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.frames import Header

_missing = ""


def prepare() -> Header:
    """Import torch and TorchCodec; where they are missing, every clip is refused in so many words."""
    global _missing
    try:
        import torch
        import torchcodec

        from omnifleet_media.decode import clip, sequential, track  # noqa: F401 -- before the door closes
    except (ImportError, RuntimeError, OSError) as error:  # TorchCodec without FFmpeg raises either
        _missing = str(error).splitlines()[0]
        return {}
    torch.set_num_threads(1)
    return {"torchcodec": torchcodec.__version__}


def work(header: Header, body: bytearray) -> tuple[Header, Sequence[memoryview]]:
    """One clip (`decode.clip.decode_clip`) or, with a `sample_rate`, one track (`decode.track.decode_track`)."""
    if _missing:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"clips and tracks need TorchCodec: {_missing}",
            knob="pip install 'omnifleet-media[video]'",
        )
    from omnifleet_media.decode.clip import decode_clip
    from omnifleet_media.decode.track import decode_track

    return (decode_track if header.get("sample_rate") else decode_clip)(header, bytes(body))
