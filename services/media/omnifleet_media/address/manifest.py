"""Media objects: a manifest's content, and what is kept beside it outside the address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from omnifleet.address import manifest_bytes, media_digest
from omnifleet.types import Digest, MediaKind, MediaRef

_SAMPLE_BYTES = 4


@dataclass(frozen=True)  # no slots: manifest and digest are computed once
class MediaObject:
    """Frames in order, all `width` x `height`; timestamps in whole microseconds, for clips only. facts: of its first source.

    Audio has one frame, its track: `width` samples at `height` a second.
    """

    kind: MediaKind
    frames: tuple[Digest, ...]
    width: int
    height: int
    timestamps_us: tuple[int, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def manifest(self) -> bytes:
        """The bytes that the address is the digest of."""
        return manifest_bytes(self.kind, self.frames, self.timestamps_us)

    @cached_property
    def digest(self) -> Digest:
        """The object's address."""
        return media_digest(self.manifest)

    @property
    def ref(self) -> MediaRef:
        """The reference that wires carry."""
        return MediaRef(self.kind, self.digest)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one canonical frame, or of the track."""
        return _SAMPLE_BYTES * self.width if self.kind is MediaKind.AUDIO else 3 * self.width * self.height

    @property
    def bytes(self) -> int:
        """Bytes of the distinct canonical frames."""
        return self.frame_bytes * len(set(self.frames))


def is_track(height: int, width: int, size: int) -> bool:
    """Whether `size` bytes are a track of `width` samples at `height` a second, rather than a frame of height x width.

    Never both: a frame has 3 x height x width bytes, a track 4 x width, and no rate is below 2.
    """
    return size == _SAMPLE_BYTES * width and size != 3 * height * width


def timestamps_us(seconds: Sequence[float]) -> tuple[int, ...]:
    """Times in whole microseconds, halves to even."""
    return tuple(round(s * 1_000_000) for s in seconds)
