"""An index that is new or lost its memory is told what the store holds, from the records beside the manifests."""

from __future__ import annotations

import asyncio
import logging

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Digest
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Index, Kind
from omnifleet_media.server.blobs import holds, manifest_file, object_blobs, source_blob
from omnifleet_media.server.record import read_record
from omnifleet_media.server.retention import now_ms
from omnifleet_media.store.tiers import Store

log = logging.getLogger("omnifleet.media")

_LOOK_S = 1.0


class Recovery:
    """Until the index knows a store, nothing of it may be called lost or an orphan (`Retention.surely`)."""

    def __init__(self, store: Store, index: Index, counters: Counters) -> None:
        self._store, self._index, self._counters = store, index, counters

    async def keep(self) -> None:
        """See to it that the index knows what the store holds, until cancelled."""
        while True:
            try:
                await self.recover()
            except OmnifleetError as error:
                log.warning("the index could not be told what the store holds: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def recover(self) -> int:
        """Tell an index that does not know the store all objects on its disk; answers how many it did not know."""
        disk = self._store.disk
        if await self._index.memory(disk.id):
            return 0
        telling, told = await self._index.begin_telling(), 0
        for digest in await asyncio.to_thread(lambda: [d for _, d, _ in disk.walk(Kind.MANIFEST)]):
            if await self._index.read_object(digest) is None and await self.restore(digest) is not None:
                told += 1
        if not await self._index.mark_store(disk.id, telling):
            log.warning("the index lost its memory while it was told %d objects", told)
        elif told:
            log.warning("the index had lost its memory and was told %d objects", told)
        return told

    async def restore(self, digest: Digest) -> MediaObject | None:
        """An object that the index does not know, if the store holds all of it. Raises OmnifleetError(UNAVAILABLE)."""
        try:
            data = await asyncio.to_thread(self._store.open, manifest_file(digest))
        except OmnifleetError as error:
            if error.reason in (Reason.MEDIA_LOST, Reason.CORRUPT):
                return None
            raise
        record = read_record(data, digest)
        if record is None:
            return None
        async with self._store.gate.writing():
            if not await holds(self._store, object_blobs(record.item)):
                return None
            has_source = await holds(self._store, [source_blob(record.source)])
            source = (record.source, record.source_bytes) if has_source else None
            await self._index.write_object(record.item, record.alias, now_ms(), source)
        self._counters.add("objects_restored")
        return record.item
