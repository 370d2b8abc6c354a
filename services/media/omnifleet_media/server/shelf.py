"""The shelf: what is here, by name, from whichever tier has it; and the one way in which bytes get there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Digest
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Index, Kind, Unit
from omnifleet_media.server.blobs import find_blob, frame_blob, holds
from omnifleet_media.server.pack import object_pack
from omnifleet_media.server.recovery import Recovery
from omnifleet_media.server.retention import Retention
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.tiers import Store

Piece = tuple[Blob, bytes | memoryview]


class Shelf:
    """Objects and blobs. One event loop; files in threads."""

    def __init__(
        self, config: MediaConfig, store: Store, index: Index, retention: Retention, counters: Counters
    ) -> None:
        self.config, self.store, self.index, self.retention = config, store, index, retention
        self.counters = counters
        self.recovery = Recovery(store, index, counters)

    async def read(self, digest: Digest) -> MediaObject:
        """A media object. Raises OmnifleetError: NOT_FOUND; UNAVAILABLE while the index is told what is here."""
        item = await self.index.read_object(digest) or await self.recovery.restore(digest)
        item = item or await self.retention.surely(lambda: self.index.read_object(digest))
        if item is None:
            raise OmnifleetError(
                Reason.NOT_FOUND, f"no media object {digest or '(no digest given)'} is here; upload it"
            )
        self.retention.used(Unit.OBJECT, digest)
        return item

    async def blob(self, kind: Kind, digest: Digest) -> Blob:
        """A known blob. Raises OmnifleetError: NOT_FOUND; UNAVAILABLE while the index is told what is here."""
        blob = await find_blob(self.index, kind, digest)
        blob = blob or await self.retention.surely(lambda: find_blob(self.index, kind, digest))
        if blob is None:
            raise OmnifleetError(Reason.NOT_FOUND, f"no {kind} {digest or '(no digest given)'} is here")
        return blob

    async def open(self, kind: Kind, digest: Digest) -> memoryview:
        """Read-only bytes. Raises OmnifleetError: NOT_FOUND, MEDIA_LOST, CORRUPT."""
        blob = await self.blob(kind, digest)
        return await asyncio.to_thread(self.store.open, blob)

    async def map_path(self, blob: Blob) -> str:
        """Where a same-host reader may map a blob, "" if it has to be streamed."""
        if not blob.shared:
            return ""
        path = self.store.shared.path(blob) or await asyncio.to_thread(self.store.map_path, blob)
        if path is None:
            return ""
        self.counters.add("shm_maps")
        return str(path)

    async def map_frames(self, item: MediaObject) -> str:
        """Where a same-host reader may map the frame of an object, or all of them as one file. "" if they do not fit.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT.
        """
        if item.bytes > self.config.shared_memory_bytes:
            return ""
        if len(set(item.frames)) == 1:
            return await self.map_path(frame_blob(item.frames[0], item.height, item.width))
        pack = object_pack(item)
        path = self.store.shared.path(pack) or await asyncio.to_thread(self.store.map_pack, pack)
        if path is None:
            return ""
        self.counters.add("shm_maps", len(pack.blobs))
        return str(path)

    async def holds(self, blobs: Iterable[Blob]) -> bool:
        """Whether the bytes of all blobs are here, or in the object store."""
        return await holds(self.store, blobs)

    async def tiers(self, blob: Blob) -> list[str]:
        """Names of the tiers that hold a blob."""
        return await asyncio.to_thread(self.store.tiers, blob)

    async def write(
        self, pieces: Sequence[Piece], kept: Sequence[Piece], commit: Callable[[], Awaitable[None]]
    ) -> list[int]:
        """Bytes first, then the index: a kill in between leaves orphans, never a promise without bytes.

        Answers the sizes of those of `pieces` that were not here before; `kept` is written with them.
        """
        new = [len(data) for blob, data in pieces if not self.store.disk.has(blob)]
        room = sum(new) + sum(len(data) for blob, data in kept if not self.store.disk.has(blob))
        await self.retention.make_room(room)
        async with self.store.gate.writing():
            await asyncio.to_thread(self.store.write, [*pieces, *kept])
            await commit()
        return new
