"""The parent's side of decoding: which processes take which source, and what comes back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.address import frame_digest, track_digest
from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind
from omnifleet_media.address.contract import STILL, TRACK, DecodeContract
from omnifleet_media.ingest.source import Source
from omnifleet_media.sandbox.pool import ProcessPool

_LARGEST_ANSWER = 4 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """Canonical frames, each uint8 RGB (H, W, 3) of one size, with times in seconds for clips; or one track: float32
    samples at `sample_rate` a second."""

    kind: MediaKind
    frames: list[npt.NDArray[Any]]
    timestamps_s: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    sample_rate: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels; of a track: (samples, samples a second)."""
        if self.kind is MediaKind.AUDIO:
            return len(self.frames[0]), self.sample_rate
        height, width = self.frames[0].shape[:2]
        return width, height

    def digests(self) -> list[Digest]:
        """The address of each frame, or of the track."""
        if self.kind is MediaKind.AUDIO:
            return [track_digest(self.frames[0], self.sample_rate)]
        return [frame_digest(frame) for frame in self.frames]


class Decoder:
    """Decoder processes. Those for clips and tracks load more and start at the first of them."""

    def __init__(self, limits: MediaLimits, processes: int) -> None:
        self._limits = limits
        self._threads = max(1, (os.cpu_count() or 1) // processes)
        answer_bytes = min(limits.decode_memory_bytes, _LARGEST_ANSWER)
        self.pictures = _pool("pictures", processes, limits, max(3 * limits.pixels, answer_bytes))
        self.clips = _pool("clips", processes, limits, answer_bytes)

    async def decode(self, source: Source, contract: DecodeContract) -> Decoded:
        """Frames or track of a source. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, UNSUPPORTED, OVERLOADED."""
        if contract.sampling == STILL:
            return await self._picture(source, contract)
        if contract.sampling == TRACK:
            return await self._track(source, contract)
        return await self._clip(source, contract)

    async def close(self) -> None:
        """End the processes."""
        await self.pictures.close()
        await self.clips.close()

    async def _picture(self, source: Source, contract: DecodeContract) -> Decoded:
        request = {
            "codec": source.type.codec,
            "pixels": self._limits.pixels,
            "background": contract.background,
        }
        answer, body = await self.pictures.call(request, source.data)
        return Decoded(MediaKind.IMAGE, _frames(answer, body, 1))

    async def _clip(self, source: Source, contract: DecodeContract) -> Decoded:
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
        pool = self.pictures if source.type.codec else self.clips
        answer, body = await pool.call(request, source.data)
        frames = _frames(answer, body, answer["frames"])
        return Decoded(MediaKind.VIDEO, frames, answer["timestamps_s"], answer["facts"])

    async def _track(self, source: Source, contract: DecodeContract) -> Decoded:
        if source.type.codec:
            raise OmnifleetError(Reason.INVALID_MEDIA, f"no_audio_stream: {source.type.mime} has no sound")
        request = {"sample_rate": contract.sample_rate, "seconds": self._limits.seconds}
        answer, body = await self.clips.call(request, source.data)
        if len(body) != 4 * answer["samples"]:
            raise _odd_answer(body, f"{answer['samples']} samples")
        samples = np.frombuffer(body, "<f4")
        return Decoded(MediaKind.AUDIO, [samples], facts=answer["facts"], sample_rate=contract.sample_rate)


def _frames(answer: dict[str, Any], body: memoryview, count: int) -> list[npt.NDArray[np.uint8]]:
    height, width, _ = answer["shape"]
    if len(body) != count * height * width * 3:
        raise _odd_answer(body, f"{count} frames")
    return list(np.frombuffer(body, np.uint8).reshape(count, height, width, 3))


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
