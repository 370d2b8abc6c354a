"""What the media service answers, as values."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.client.media.tensors import Tensors
from omnifleet.types import Digest, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_from_wire


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """What a manifest says. timestamps_s: seconds, clips only; bytes: of the canonical frames.

    Audio has one digest, its track's: `samples` of float32 at `sample_rate` a second, and no width or height.
    """

    ref: MediaRef
    frame_digests: tuple[Digest, ...]
    timestamps_s: tuple[float, ...]
    width: int
    height: int
    bytes: int
    facts: dict[str, str]
    samples: int = 0
    sample_rate: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Model-ready tensors of one media object under one processor; the arrays are read-only.

    tensors: for the Qwen2-VL family pixel_values float32 [patches, patch values] and image_grid_thw int64 [1, 3].
    token_count: placeholder tokens in a prompt. grid: (t, h, w) in patches. mapped: shares the service's memory.
    times_s: seconds of the first frame of each temporal patch, clips only.
    """

    key: Digest
    fingerprint: Digest
    token_count: int
    grid: tuple[int, ...]
    tensors: Tensors
    bytes: int
    mapped: bool
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Stat:
    """An object, how many leases hold it and where its frames are (memory, shared_memory, disk)."""

    info: MediaInfo
    leases: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection freed, or would free in a dry run. orphans: files that nothing refers to."""

    freed_bytes: int
    removed: int
    orphans: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Blobs read back in full, and the digests whose bytes were wrong (these blobs are gone now)."""

    checked: int
    corrupt: tuple[Digest, ...]


def info_from_wire(message: media_pb2.ObjectInfo) -> MediaInfo:
    """A message as what a manifest says."""
    return MediaInfo(
        ref=media_from_wire(message.ref),
        frame_digests=tuple(Digest(d) for d in message.frame_digests),
        timestamps_s=tuple(message.timestamps_s),
        width=message.width,
        height=message.height,
        bytes=message.bytes,
        facts=dict(message.facts),
        samples=message.samples,
        sample_rate=message.sample_rate,
    )
