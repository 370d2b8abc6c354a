"""The parent's side of decoding: which processes take which source, and what comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet_media.address.contract import STILL, TRACK, DecodeContract
from omnifleet_media.ingest.source import Source
from omnifleet_media.sandbox.frames import Header
from omnifleet_media.sandbox.pool import ProcessPool

_LARGEST_ANSWER = 4 << 30


Array = npt.NDArray[Any]
Kept = TypeVar("Kept")
Take = Callable[[Array, int], Kept]
"""What to make of a frame, uint8 RGB (H, W, 3) and 0, or of a track, float32 (N,) and its samples a second. The array is
nobody else's, and its memory is used again afterwards. Runs in a thread, while the next source is being decoded."""


@dataclass(frozen=True, slots=True)
class Decoded(Generic[Kept]):
    """What was made of the canonical frames, all of one size, or of the track.

    size: (width, height) in pixels; of a track: (samples, samples a second). timestamps_s: of the frames of a clip.
    """

    kind: MediaKind
    frames: list[Kept]
    size: tuple[int, int]
    timestamps_s: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


class Decoder:
    """Decoder processes. Those for clips and tracks load more and start at the first of them."""

    def __init__(self, limits: MediaLimits, processes: int) -> None:
        self._limits = limits
        self._threads = max(1, (os.cpu_count() or 1) // processes)
        answer_bytes = min(limits.decode_memory_bytes, _LARGEST_ANSWER)
        self.pictures = _pool("pictures", processes, limits, max(3 * limits.pixels, answer_bytes))
        self.clips = _pool("clips", processes, limits, answer_bytes)

    async def decode(self, source: Source, contract: DecodeContract, take: Take[Kept]) -> Decoded[Kept]:
        """Frames or track of a source, each as `take` keeps it.

        Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, UNSUPPORTED, OVERLOADED; and what `take` raises.
        """
        if contract.sampling == STILL:
            return await self._picture(source, contract, take)
        if contract.sampling == TRACK:
            return await self._track(source, contract, take)
        return await self._clip(source, contract, take)

    async def close(self) -> None:
        """End the processes."""
        await self.pictures.close()
        await self.clips.close()

    async def _picture(self, source: Source, contract: DecodeContract, take: Take[Kept]) -> Decoded[Kept]:
        request = {
            "codec": source.type.codec,
            "pixels": self._limits.pixels,
            "background": contract.background,
        }

        def kept(answer: Header, body: memoryview) -> Decoded[Kept]:
            frames = _taken(answer, body, 1, take)
            return Decoded(MediaKind.IMAGE, frames, _size(answer))

        decoded: Decoded[Kept] = await self.pictures.call(request, source.data, kept)
        return decoded

    async def _clip(self, source: Source, contract: DecodeContract, take: Take[Kept]) -> Decoded[Kept]:
        request: dict[str, Any] = {
            "codec": source.type.codec,
            "sampling": contract.sampling,
            "num_frames": contract.num_frames,
            "fps": contract.fps,
            "temporal_patch": contract.temporal_patch,
            "indices": list(contract.indices),
            "background": contract.background,
            "threads": self._threads,
            "pixels": self._limits.pixels,
            "frames": self._limits.frames,
            "bytes": min(self._limits.decode_memory_bytes, _LARGEST_ANSWER),
        }

        def kept(answer: Header, body: memoryview) -> Decoded[Kept]:
            frames = _taken(answer, body, answer["frames"], take)
            return Decoded(MediaKind.VIDEO, frames, _size(answer), answer["timestamps_s"], answer["facts"])

        pool = self.pictures if source.type.codec else self.clips
        decoded: Decoded[Kept] = await pool.call(request, source.data, kept)
        return decoded

    async def _track(self, source: Source, contract: DecodeContract, take: Take[Kept]) -> Decoded[Kept]:
        if source.type.codec:
            raise OmnifleetError(Reason.INVALID_MEDIA, f"no_audio_stream: {source.type.mime} has no sound")
        request = {"sample_rate": contract.sample_rate, "seconds": self._limits.seconds}

        def kept(answer: Header, body: memoryview) -> Decoded[Kept]:
            if len(body) != 4 * answer["samples"]:
                raise _odd_answer(body, f"{answer['samples']} samples")
            samples = np.frombuffer(body, "<f4").copy()
            size = len(samples), contract.sample_rate
            return Decoded(
                MediaKind.AUDIO, [take(samples, contract.sample_rate)], size, facts=answer["facts"]
            )

        decoded: Decoded[Kept] = await self.clips.call(request, source.data, kept)
        return decoded


def _size(answer: Header) -> tuple[int, int]:
    height, width, _ = answer["shape"]
    return width, height


def _taken(answer: Header, body: memoryview, count: int, take: Take[Kept]) -> list[Kept]:
    """Each frame, copied out of the decoder's reach into memory that stays in the processor's cache, then taken."""
    width, height = _size(answer)
    if len(body) != count * height * width * 3:
        raise _odd_answer(body, f"{count} frames")
    frames = np.frombuffer(body, np.uint8).reshape(count, height, width, 3)
    own, kept = np.empty((height, width, 3), np.uint8), []
    for frame in frames:
        own[:] = frame
        kept.append(take(own, 0))
    return kept


def _odd_answer(body: memoryview, what: str) -> OmnifleetError:
    return OmnifleetError(Reason.INVALID_MEDIA, f"a decoder answered {len(body)} bytes for {what}")


def _pool(role: str, processes: int, limits: MediaLimits, reply_bytes: int) -> ProcessPool:
    return ProcessPool(
        role,
        processes,
        work_s=limits.decode_seconds,
        memory_bytes=limits.decode_memory_bytes,
        reply_bytes=reply_bytes,
        time_knob="media.limits.decode_seconds",
    )
