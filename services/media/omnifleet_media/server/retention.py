"""What stays and what goes: leases, last use, eviction, collection of orphans, verification."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Digest, Lease
from omnifleet_media.index.port import BlobName, Entry, Index, Kind, Unit
from omnifleet_media.server.blobs import find_blob, frame_blob, manifest_blob
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.tiers import Store

Found = TypeVar("Found")

log = logging.getLogger("omnifleet.media")

_BATCH = 256
_LONGEST_LEASE_MS = 24 * 3600 * 1000
_TOUCH_S = 1.0
Admit = Callable[[str, Sequence[Digest]], Awaitable[None]]


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class Collection:
    """What a collection removed, or would remove. orphans: files that the index does not know."""

    freed_bytes: int = 0
    removed: int = 0
    orphans: int = 0


class Retention:
    """Keeps the disk tier within `disk_bytes`; touches nothing that is leased or being written."""

    def __init__(
        self,
        store: Store,
        index: Index,
        disk_bytes: int,
        counters: Counters,
        admit: Admit | None = None,
    ) -> None:
        """admit: awaited before a run takes a lease, one at a time for each run; it may refuse by raising."""
        self._store, self._index, self._disk_bytes, self._counters = store, index, disk_bytes, counters
        self._admit = admit
        self._taking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._used: dict[Entry, int] = {}
        self._evicting = asyncio.Lock()
        self.leases_active = 0

    # ------------------------------------------------------------------ use and leases

    def used(self, unit: Unit, digest: Digest) -> None:
        """Note a use; the index learns of it within a second."""
        self._used[Entry(unit, digest)] = now_ms()

    async def keep_notes(self) -> None:
        """Bring last uses to the index, count leases and keep to the size of the disk, until cancelled."""
        while True:
            await asyncio.sleep(_TOUCH_S)
            try:
                await self.note()
                if self._store.objects is not None and self._store.disk.used > self._disk_bytes:
                    async with self._evicting:
                        await self._drop_local(0, Collection())
            except OmnifleetError as error:
                log.warning("last uses wait: %s", error)

    async def note(self) -> None:
        """Bring last uses to the index now."""
        used, self._used = self._used, {}
        try:
            if used:
                await self._index.touch(used)
        except OmnifleetError:
            self._used = {**used, **self._used}
            raise
        self.leases_active = await self._index.count_leases(None, now_ms())

    async def take_lease(self, run: str, owner: str, ttl_ms: int, digests: Sequence[Digest]) -> Lease:
        """Lease objects, sources or segments. Raises OmnifleetError: INVALID_REQUEST, MEDIA_LOST."""
        if not owner or not digests:
            raise invalid("a lease needs an owner and at least one digest")
        ttl_ms = _checked_ttl(ttl_ms)
        async with self._taking.setdefault(run, asyncio.Lock()):
            if self._admit is not None:
                await self._admit(run, digests)
            lease = Lease(uuid.uuid4().hex, owner, run, now_ms() + ttl_ms)
            missing: list[Digest] = []

            async def take() -> bool:
                missing[:] = await self._index.take_lease(lease, digests)
                return not missing

            taken = await take() or await self.surely(take)
        if not taken:
            raise OmnifleetError(
                Reason.MEDIA_LOST,
                f"{len(missing)} of {len(digests)} digests are not here: {', '.join(missing[:4])}",
            )
        self.leases_active += 1
        return lease

    async def renew_lease(self, lease_id: str, ttl_ms: int) -> Lease:
        """Extend a lease. Raises OmnifleetError(NOT_FOUND) once it has expired: its content may be gone."""
        lease = await self._index.renew_lease(lease_id, now_ms() + _checked_ttl(ttl_ms), now_ms())
        if lease is None:
            raise OmnifleetError(
                Reason.NOT_FOUND, f"lease {lease_id} has expired or was given back; take a new one"
            )
        return lease

    async def release_lease(self, lease_id: str) -> bool:
        """Give a lease back; twice is harmless."""
        released = await self._index.release_lease(lease_id)
        self.leases_active = max(self.leases_active - released, 0)
        return released

    async def surely(self, look: Callable[[], Awaitable[Found]]) -> Found:
        """`look` again for what the index does not know: it may be here all the same while the index is told anew.

        Raises OmnifleetError(UNAVAILABLE), retryable, if nothing is found and the index lacked its memory, or lost it.
        """
        memory = await self._index.memory(self._store.disk.id)
        found = await look()
        if not found:
            await self._refuse_unless(memory)
        return found

    async def _refuse_unless(self, memory: str) -> None:
        """Raises OmnifleetError(UNAVAILABLE) unless the index has remembered ever since it told this memory's name."""
        if not memory or memory != await self._index.memory(self._store.disk.id):
            raise retryable(
                Reason.UNAVAILABLE,
                "the index has lost its memory and is being told what the store holds",
                retry_after_ms=500,
            )

    # ------------------------------------------------------------------ eviction

    async def make_room(self, size: int) -> None:
        """Evict until `size` more bytes fit, orphans first if all else is leased.

        What is being written beside is not counted: the disk tier may exceed its size by that. Raises
        OmnifleetError(DISK_FULL) if what is leased leaves no room.
        """
        if self._store.disk.used + size <= self._disk_bytes:
            return
        async with self._evicting:
            found = Collection()
            await self._shrink(self._disk_bytes - size, found)
            if self._store.disk.used + size > self._disk_bytes:
                await self._collect_orphans(found, dry_run=False)
        if self._store.disk.used + size > self._disk_bytes:
            raise OmnifleetError(
                Reason.DISK_FULL,
                f"{size} bytes do not fit: {self._store.disk.used} of {self._disk_bytes} bytes are leased or in use",
                knob="media.disk_bytes",
            )

    async def collect(self, target_bytes: int, *, dry_run: bool) -> Collection:
        """Remove orphans, then evict down to `target_bytes`. With an object store, eviction moves content there."""
        found = Collection()
        async with self._evicting:
            await self._collect_orphans(found, dry_run=dry_run)
            if dry_run:
                await self._preview(target_bytes, found)
            else:
                await self._shrink(target_bytes, found)
        return found

    async def _shrink(self, target: int, found: Collection) -> None:
        if self._store.objects is not None:
            await self._drop_local(target, found)
            return
        await self.note()
        while self._store.disk.used > target:
            idle = await self._index.idle(now_ms(), _BATCH)
            removed = 0
            for entry in idle:
                if self._store.disk.used <= target:
                    return
                removed += await self._evict(entry, found)
            if removed == 0:
                return

    async def _evict(self, entry: Entry, found: Collection) -> bool:
        async with self._store.gate.removing():
            names = await self._index.forget(entry, now_ms())
            if names is None:
                return False
            found.freed_bytes += self._remove(names)
        found.removed += 1
        self._counters.add("evictions")
        return True

    def _remove(self, names: Iterable[BlobName]) -> int:
        return sum(self._store.remove(name.kind, name.digest) for name in names)

    async def _drop_local(self, target: int, found: Collection) -> None:
        """Longest unread first, and a tenth more than asked: every pass reads the whole folder. The index keeps all."""
        target = min(target, self._disk_bytes) * 9 // 10
        oldest = await asyncio.to_thread(self._store.disk.oldest)
        for start in range(0, len(oldest), _BATCH):
            page = oldest[start : start + _BATCH]
            names = [BlobName(Kind(kind), digest) for kind, digest, _ in page]
            held = await self._index.held_blobs(names, now_ms())
            for name in names:
                if self._store.disk.used <= target:
                    return
                blob = await find_blob(self._index, *name.key) if name not in held else None
                if blob is not None:
                    found.freed_bytes += await asyncio.to_thread(self._store.demote, blob)
                    found.removed += 1
                    self._counters.add("demotions")

    async def _preview(self, target: int, found: Collection) -> None:
        used, seen = self._store.disk.used - found.freed_bytes, 0
        while page := await self._index.idle(now_ms(), _BATCH, seen):
            for entry in page:
                if used - found.freed_bytes <= target:
                    return
                found.freed_bytes += await self._size(entry)
                found.removed += 1
            seen += len(page)

    async def _size(self, entry: Entry) -> int:
        names = [(Kind(entry.unit), entry.digest)] if entry.unit is not Unit.OBJECT else []
        if entry.unit is Unit.OBJECT:
            item = await self._index.read_object(entry.digest)
            frames = set(item.frames) if item else set()
            names = [(Kind.MANIFEST, entry.digest), *((Kind.FRAME, frame) for frame in frames)]
        paths = [self._store.disk.path(*name) for name in names]
        return sum(path.stat().st_size for path in paths if path.exists())

    async def _collect_orphans(self, found: Collection, *, dry_run: bool) -> None:
        files = await asyncio.to_thread(lambda: list(self._store.disk.walk()))
        for start in range(0, len(files), _BATCH):
            unknown = [file for file in files[start : start + _BATCH] if await self._is_unknown(file)]
            if not unknown:
                continue
            async with self._store.gate.removing():  # nobody is about to rely on a file that is unknown now
                memory = await self._index.memory(self._store.disk.id)
                unknown = [file for file in unknown if await self._is_unknown(file)]
                await self._refuse_unless(memory)
                found.orphans += len(unknown)
                for kind, digest, size in unknown:
                    found.freed_bytes += size if dry_run else self._store.remove(kind, digest)

    async def _is_unknown(self, file: tuple[str, Digest, int]) -> bool:
        kind, digest, _ = file
        return await find_blob(self._index, Kind(kind), digest) is None

    # ------------------------------------------------------------------ verification

    async def verify(self, digests: Sequence[Digest]) -> tuple[int, list[Digest]]:
        """Read blobs from disk (none given: all that the index knows) and remove wrong ones: (checked, corrupt)."""
        blobs = await (self._named(digests) if digests else self._all())
        checked, corrupt = 0, []
        for blob in blobs:
            checked += 1
            if not await asyncio.to_thread(self._is_right, blob):
                corrupt.append(blob.digest)
                self._store.remove(blob.kind, blob.digest)
        self._counters.add("verified", checked)
        return checked, corrupt

    def _is_right(self, blob: Blob) -> bool:
        disk, objects = self._store.disk, self._store.objects
        try:
            if objects is not None and not disk.has(blob):
                objects.open(blob)
            else:
                disk.open(blob)
        except OmnifleetError as error:
            if error.reason in (Reason.CORRUPT, Reason.MEDIA_LOST):
                return False
            raise
        return True

    async def _all(self) -> list[Blob]:
        names = await asyncio.to_thread(lambda: list(self._store.disk.walk()))
        found = [await find_blob(self._index, Kind(kind), digest) for kind, digest, _ in names]
        return [blob for blob in found if blob is not None]

    async def _named(self, digests: Sequence[Digest]) -> list[Blob]:
        blobs: list[Blob] = []
        for digest in digests:
            item = await self._index.read_object(digest)
            if item is not None:
                frames = [frame_blob(frame, item.height, item.width) for frame in dict.fromkeys(item.frames)]
                blobs += [manifest_blob(digest), *frames]
                continue
            found = [
                await find_blob(self._index, kind, digest) for kind in (Kind.FRAME, Kind.SOURCE, Kind.SEGMENT)
            ]
            known = [blob for blob in found if blob is not None]
            if not known:
                raise OmnifleetError(Reason.NOT_FOUND, f"nothing is stored under {digest}")
            blobs += known
        return blobs


def _checked_ttl(ttl_ms: int) -> int:
    if not 0 < ttl_ms <= _LONGEST_LEASE_MS:
        raise invalid(f"a lease lasts 1 to {_LONGEST_LEASE_MS} ms, not {ttl_ms}", knob="ttl_ms")
    return ttl_ms
