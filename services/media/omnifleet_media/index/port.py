"""The index behind one port: SQLite when embedded; a fleet may share another implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from omnifleet.types import Digest, Lease
from omnifleet_media.address.manifest import MediaObject


class Unit(StrEnum):
    """What is leased, used and evicted as a whole. An object takes its manifest and its unshared frames along."""

    OBJECT = "object"
    SOURCE = "source"
    SEGMENT = "segment"


class Kind(StrEnum):
    """What a blob holds."""

    FRAME = "frame"
    MANIFEST = "manifest"
    SOURCE = "source"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class BlobName:
    """One stored file."""

    kind: Kind
    digest: Digest

    @property
    def key(self) -> tuple[Kind, Digest]:
        """Both parts."""
        return (self.kind, self.digest)


@dataclass(frozen=True, slots=True)
class Entry:
    """One unit."""

    unit: Unit
    digest: Digest


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Facts of a segment. content: digest of its file (domain "tensors"). grid: (t, h, w) in patches."""

    key: Digest
    media: Digest
    fingerprint: Digest
    token_count: int
    grid: tuple[int, ...]
    bytes: int
    content: Digest


class Claim(StrEnum):
    """Answer to a claim. known: the index has an alias or a segment under this key; the claim is ours unless it was only
    wanted for what is not known."""

    OTHERS = "others"
    OURS = "ours"
    KNOWN = "known"


class Index(Protocol):
    """Every method is one atomic step. Times are Unix milliseconds. A lost connection raises UNAVAILABLE, retryable."""

    async def find_alias(self, alias: Digest) -> Digest | None:
        """The media object that a source became under a contract."""

    async def find_object(self, alias: Digest) -> MediaObject | None:
        """That object itself."""

    async def read_object(self, media: Digest) -> MediaObject | None:
        """A media object."""

    async def read_frame(self, frame: Digest) -> tuple[int, int] | None:
        """(height, width) of a frame that some object refers to."""

    async def has_source(self, source: Digest) -> bool:
        """Whether the source is stored."""

    async def read_segment(self, key: Digest) -> SegmentRecord | None:
        """A segment."""

    async def write_source(self, source: Digest, size: int, used_ms: int) -> None:
        """Record a stored source of `size` bytes; again is harmless."""

    async def write_object(
        self, item: MediaObject, alias: Digest | None, used_ms: int, source: tuple[Digest, int] | None = None
    ) -> None:
        """Record an object, its frames and, if given, an alias and a stored source (digest, bytes); again is harmless.

        A claim on the alias, whoever's it is, ends with it: what was to be made is known now.
        """

    async def write_segment(self, record: SegmentRecord, used_ms: int) -> None:
        """Record a segment; again is harmless. A claim on its key ends with it."""

    async def touch(self, used: Mapping[Entry, int]) -> None:
        """Move last-use times forward."""

    async def take_lease(self, lease: Lease, digests: Sequence[Digest]) -> list[Digest]:
        """Lease units by digest, all or nothing; answers those that do not exist (then nothing is leased).

        Again under the same lease id is harmless: a caller whose answer was lost asks again.
        """

    async def renew_lease(self, lease_id: str, expires_ms: int, now_ms: int) -> Lease | None:
        """Move an unexpired lease's end; None if there is none."""

    async def release_lease(self, lease_id: str) -> bool:
        """Drop a lease; False if there is none."""

    async def count_leases(self, digest: Digest | None, now_ms: int) -> int:
        """Unexpired leases on a digest, or all."""

    async def held(self, run: str, now_ms: int) -> dict[Digest, int]:
        """What the unexpired leases of a run hold: digest -> bytes of its content (0 if the unit has gone)."""
        ...

    async def held_blobs(self, names: Sequence[BlobName], now_ms: int) -> set[BlobName]:
        """Those of `names` that belong to a leased unit."""
        ...

    async def count_objects(self) -> int:
        """How many distinct media objects are known."""
        ...

    async def recent(self, limit: int) -> list[Digest]:
        """Media objects, most recently used first."""
        ...

    async def idle(self, now_ms: int, limit: int, skip: int = 0) -> list[Entry]:
        """Unleased units after the first `skip`, least recently used first. A leased object's segments count as leased."""

    async def forget(self, entry: Entry, now_ms: int) -> list[BlobName] | None:
        """Remove a unit and answer the blobs that nothing refers to any more; None if it is leased or gone."""

    async def take_flight(
        self, key: Digest, owner: str, expires_ms: int, now_ms: int, *, unless_known: bool = False
    ) -> Claim:
        """Claim the making of `key` until `expires_ms`, or prolong one's own claim, unless another's holds.

        unless_known: nor if the key is known, whoever claims it; the answer is then KNOWN and nothing is written.
        """
        ...

    async def end_flight(self, key: Digest, owner: str) -> None:
        """Give a claim up; one that has passed to another is left alone."""

    async def memory(self, store: str) -> str:
        """Names what the index remembers of this store; "" if it was not told all of it since it may have lost something.

        Another name later: it may have lost something in between, and was told anew.
        """
        ...

    async def begin_telling(self) -> str:
        """A name for the telling that begins; `mark_store` wants it."""
        ...

    async def mark_store(self, store: str, telling: str) -> bool:
        """Note that the index was told all that the store holds; False if it may have lost some since that telling began."""
        ...

    async def sync(self) -> None:
        """Return when everything written so far survives a power cut."""

    async def close(self) -> None:
        """Finish writing and let go."""
