"""The parent's side of decoding: which processes take which source, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet_media.address.contract import STILL, DecodeContract
from omnifleet_media.ingest.source import Source
from omnifleet_media.sandbox.pool import ProcessPool

_CLIP_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """Canonical frames, each uint8 RGB (H, W, 3) of one size; times in seconds, for clips."""

    kind: MediaKind
    frames: list[npt.NDArray[np.uint8]]
    timestamps_s: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


class Decoder:
    """Decoder processes. Those for clips load more and start at the first clip."""

    def __init__(self, limits: MediaLimits, processes: int) -> None:
        self._limits = limits
        self.pictures = _pool("pictures", processes, limits, 3 * limits.pixels)
        self.clips = _pool("clips", processes, limits, _CLIP_BYTES)

    async def decode(self, source: Source, contract: DecodeContract) -> Decoded:
        """Frames of a source. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, UNSUPPORTED, OVERLOADED."""
        return await (self._picture if contract.sampling == STILL else self._clip)(source, contract)

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
            "sampling": contract.sampling,
            "num_frames": contract.num_frames,
            "fps": contract.fps,
            "temporal_patch": contract.temporal_patch,
            "pixels": self._limits.pixels,
            "frames": self._limits.frames,
        }
        answer, body = await self.clips.call(request, source.data)
        frames = _frames(answer, body, answer["frames"])
        return Decoded(MediaKind.VIDEO, frames, answer["timestamps_s"], answer["facts"])


def _frames(answer: dict[str, Any], body: memoryview, count: int) -> list[npt.NDArray[np.uint8]]:
    height, width, _ = answer["shape"]
    if len(body) != count * height * width * 3:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"a decoder answered {len(body)} bytes for {count} frames")
    return list(np.frombuffer(body, np.uint8).reshape(count, height, width, 3))


def _pool(role: str, processes: int, limits: MediaLimits, reply_bytes: int) -> ProcessPool:
    return ProcessPool(
        role,
        processes,
        work_s=limits.decode_seconds,
        memory_bytes=limits.decode_memory_bytes,
        reply_bytes=reply_bytes,
        time_knob="media.limits.decode_seconds",
    )
