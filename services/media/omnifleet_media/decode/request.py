"""The parent's side of decoding: which processes take which source, and what comes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

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


@dataclass(frozen=True, slots=True)
class Decoded:
    """Canonical frames, each uint8 RGB (H, W, 3) of one size; or one track: float32 (N,).

    count, frame: how many frames there are, and one by its number. Any thread may take one; it is nobody else's, and its
    memory is used again for the next that the thread takes.
    bytes: of all frames together. size: (width, height) in pixels; of a track: (samples, samples a second).
    timestamps_s: of the frames of a clip.
    """

    kind: MediaKind
    count: int
    frame: Callable[[int], Array]
    bytes: int
    size: tuple[int, int]
    timestamps_s: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


Keep = Callable[[Decoded], Kept]
"""What to make of what was decoded. Runs in a thread, while the process is at the next source."""


class Decoder:
    """Decoder processes. Those for clips and tracks load more and start at the first of them."""

    def __init__(self, limits: MediaLimits, processes: int) -> None:
        self._limits = limits
        self._threads = max(1, len(os.sched_getaffinity(0)) // processes)
        answer_bytes = min(limits.decode_memory_bytes, _LARGEST_ANSWER)
        self.pictures = _pool("pictures", processes, limits, max(3 * limits.pixels, answer_bytes))
        self.clips = _pool("clips", processes, limits, answer_bytes)

    async def decode(self, source: Source, contract: DecodeContract, keep: Keep[Kept]) -> Kept:
        """What `keep` makes of the frames or the track of a source.

        Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, UNSUPPORTED, OVERLOADED; and what `keep` raises.
        """
        if contract.sampling == STILL:
            return await self._picture(source, contract, keep)
        if contract.sampling == TRACK:
            return await self._track(source, contract, keep)
        return await self._clip(source, contract, keep)

    async def close(self) -> None:
        """End the processes."""
        await self.pictures.close()
        await self.clips.close()

    async def _picture(self, source: Source, contract: DecodeContract, keep: Keep[Kept]) -> Kept:
        request = {
            "codec": source.type.codec,
            "pixels": self._limits.pixels,
            "background": contract.background,
        }

        def take(answer: Header, body: memoryview) -> Kept:
            return keep(Decoded(MediaKind.IMAGE, 1, _frames(answer, body, 1), len(body), _size(answer)))

        kept: Kept = await self.pictures.call(request, source.data, take)
        return kept

    async def _clip(self, source: Source, contract: DecodeContract, keep: Keep[Kept]) -> Kept:
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
            "seconds": self._limits.seconds,
            "bytes": min(self._limits.decode_memory_bytes, _LARGEST_ANSWER),
        }

        def take(answer: Header, body: memoryview) -> Kept:
            count, times = answer["frames"], answer["timestamps_s"]
            frame, size = _frames(answer, body, count), _size(answer)
            return keep(Decoded(MediaKind.VIDEO, count, frame, len(body), size, times, answer["facts"]))

        pool = self.pictures if source.type.codec else self.clips
        kept: Kept = await pool.call(request, source.data, take)
        return kept

    async def _track(self, source: Source, contract: DecodeContract, keep: Keep[Kept]) -> Kept:
        if source.type.codec:
            raise OmnifleetError(Reason.INVALID_MEDIA, f"no_audio_stream: {source.type.mime} has no sound")
        request = {"sample_rate": contract.sample_rate, "seconds": self._limits.seconds}

        def take(answer: Header, body: memoryview) -> Kept:
            if len(body) != 4 * answer["samples"]:
                raise _odd_answer(body, f"{answer['samples']} samples")
            samples = np.frombuffer(body, "<f4").copy()
            size = len(samples), contract.sample_rate
            return keep(
                Decoded(MediaKind.AUDIO, 1, lambda _: samples, len(body), size, facts=answer["facts"])
            )

        kept: Kept = await self.clips.call(request, source.data, take)
        return kept


def _size(answer: Header) -> tuple[int, int]:
    height, width, _ = answer["shape"]
    return width, height


def _frames(answer: Header, body: memoryview, count: int) -> Callable[[int], Array]:
    """Frames by number, each copied out of the decoder's reach as it is asked for, while it is in the processor's cache."""
    width, height = _size(answer)
    if len(body) != count * height * width * 3:
        raise _odd_answer(body, f"{count} frames")
    frames = np.frombuffer(body, np.uint8).reshape(count, height, width, 3)
    threads = threading.local()

    def frame(i: int) -> Array:
        own: Array | None = getattr(threads, "own", None)
        if own is None:
            own = threads.own = np.empty((height, width, 3), np.uint8)
        own[:] = frames[i]
        return own

    return frame


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
