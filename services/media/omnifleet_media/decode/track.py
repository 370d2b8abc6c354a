"""Audio to a canonical track with TorchCodec: one channel, float32, at the rate of the contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torchcodec.decoders import AudioDecoder

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.frames import Header


def decode_track(header: Header, data: bytes) -> tuple[Header, Sequence[memoryview]]:
    """header: sample_rate; limit seconds. Answers samples and facts; the body is little-endian float32.

    Channels are resampled one by one, then averaged. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED.
    """
    rate = header["sample_rate"]
    decoder = _open(data, rate)
    metadata = decoder.metadata
    if (metadata.duration_seconds or 0) > header["seconds"]:
        raise _too_long(float(metadata.duration_seconds or 0), header["seconds"])
    try:
        channels = decoder.get_all_samples().data.numpy()
    except RuntimeError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the track cannot be decoded: {error}") from error
    if channels.shape[1] == 0:
        raise OmnifleetError(Reason.INVALID_MEDIA, "the track has no samples")
    if channels.shape[1] > header["seconds"] * rate:
        raise _too_long(channels.shape[1] / rate, header["seconds"])
    track = channels[0] if len(channels) == 1 else channels.mean(axis=0, dtype=np.float64)
    if not np.isfinite(track).all():
        raise OmnifleetError(Reason.INVALID_MEDIA, "the track has samples that are no numbers")
    samples = np.ascontiguousarray(track, "<f4")
    facts = {"channels": str(len(channels)), "source_rate": str(metadata.sample_rate)}
    return {"samples": len(samples), "facts": facts}, [samples.data.cast("B")]


def _open(data: bytes, rate: int) -> AudioDecoder:
    try:
        return AudioDecoder(data, sample_rate=rate)
    except ValueError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, "no_audio_stream: the file has no audio stream") from error
    except RuntimeError as error:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the file cannot be read: {error}") from error


def _too_long(seconds: float, limit: float) -> OmnifleetError:
    return OmnifleetError(
        Reason.LIMIT_EXCEEDED,
        f"the track has {seconds:.1f} s, at most {limit:g} s are allowed",
        knob="media.limits.seconds",
    )
