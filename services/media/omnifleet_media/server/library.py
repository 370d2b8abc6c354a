"""The library: sources in, objects out; each made once, however many ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from omnifleet.address import (
    alias_key,
    frame_digest,
    source_digest,
    track_digest,
)
from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.flight import SingleFlight
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.contract import DecodeContract
from omnifleet_media.address.manifest import MediaObject, timestamps_us
from omnifleet_media.decode.request import Decoded, Decoder
from omnifleet_media.index.port import Index, Kind, Unit
from omnifleet_media.ingest.sniff import SourceType, sniff
from omnifleet_media.ingest.source import Source
from omnifleet_media.sandbox.pool import ProcessPool
from omnifleet_media.server.blobs import (
    frame_blob,
    manifest_blob,
    object_blobs,
    source_blob,
)
from omnifleet_media.server.flights import Flights
from omnifleet_media.server.record import Record, record_bytes
from omnifleet_media.server.retention import Retention, now_ms
from omnifleet_media.server.segments import Segments
from omnifleet_media.server.shelf import Piece, Shelf
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.tiers import Store

log = logging.getLogger("omnifleet.media")

_TRIES = 3
_FRAME_THREADS = 4  # frames of a clip that are hashed and written at once
_SHORT_BYTES = 1 << 20  # hashed in less time than it takes to hand the bytes to a thread
Answer = TypeVar("Answer")
ContractOf = Callable[[SourceType], DecodeContract]


@dataclass(frozen=True, slots=True)
class Stored:
    """Outcome of a put. decoded: this call's source was decoded now, not found.

    new_frames, new_bytes: frames that this put was the first to bring, and their canonical bytes.
    """

    item: MediaObject
    source: Digest
    decoded: bool
    new_frames: int = 0
    new_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a decoder's thread made of a source. new: sizes of the frames that were not here.

    lacking: what has yet to be written; else all of it was here when `removals` blobs had been removed from the disk.
    """

    record: Record
    new: list[int]
    lacking: list[Piece]
    removals: int = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """An object that was found or made, and what its making brought that was new."""

    item: MediaObject
    new_frames: int = 0
    new_bytes: int = 0


class Library(Shelf):
    """The shelf, and what puts things there. Hashing in threads; decoding and processors in processes."""

    def __init__(
        self,
        config: MediaConfig,
        store: Store,
        index: Index,
        retention: Retention,
        decoder: Decoder,
        processors: ProcessPool,
        counters: Counters,
    ) -> None:
        super().__init__(config, store, index, retention, counters)
        self._decoder = decoder
        self._flights = Flights(index)
        self._frames = ThreadPoolExecutor(_FRAME_THREADS, thread_name_prefix="media-frames")
        self._decodes: SingleFlight[Digest, tuple[_Made, bool]] = SingleFlight()
        self.segments = Segments(self, processors, self._flights)

    async def warm(self) -> None:
        """Start the first processes ahead of the first call; where there is no transformers, that is no fault."""
        try:
            await self._decoder.pictures.warm()
            await self.segments.warm()
        except OmnifleetError as error:
            log.warning("%s", error)

    async def close(self) -> None:
        """Stop what is being made, end all processes, write last uses."""
        await self._decodes.close()
        await self.segments.close()
        await self._decoder.close()
        self._frames.shutdown(wait=False)
        await self.retention.note()

    # ------------------------------------------------------------------ sources to objects

    async def put(self, source: Source, contract: DecodeContract, *, durable: bool) -> Stored:
        """Store a source and its object. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, DISK_FULL, OVERLOADED."""
        self.counters.add("puts")
        digest = await _computed(len(source.data), lambda: source_digest(source.data))
        return await self._stored(digest, source, contract, durable=durable)

    async def put_leased(
        self, source: Source, contract: DecodeContract, run: str, owner: str, ttl_ms: int, *, durable: bool
    ) -> tuple[Stored, Lease]:
        """Store and lease. An object that is evicted between the two is stored again."""
        for _ in range(_TRIES):
            stored = await self.put(source, contract, durable=durable)
            try:
                return stored, await self.retention.take_lease(run, owner, ttl_ms, [stored.item.digest])
            except OmnifleetError as error:
                if error.reason is not Reason.MEDIA_LOST:
                    raise
        raise retryable(
            Reason.OVERLOADED, "the object is evicted as fast as it is stored", knob="media.disk_bytes"
        )

    async def decode(self, digest: Digest, contract_of: ContractOf) -> Stored:
        """The object of a stored source. Raises OmnifleetError: NOT_FOUND, MEDIA_LOST and those of `put`."""
        data = bytes(await self.open(Kind.SOURCE, digest))
        source = Source(data, sniff(data))
        return await self._stored(digest, source, contract_of(source.type), durable=False)

    async def _stored(
        self, digest: Digest, source: Source, contract: DecodeContract, *, durable: bool
    ) -> Stored:
        alias = alias_key(digest, contract.as_alias_part())
        joins = self._decodes.running(alias)
        made, decoded = await self._decodes.do(
            alias,
            lambda: self._flights.find_or_make(
                alias, lambda: self._find(alias), lambda: self._make(alias, digest, source, contract)
            ),
        )
        item = made.item
        if joins or not decoded:
            self.counters.add("alias_hits")
            self.retention.used(Unit.OBJECT, item.digest)
            self.retention.used(Unit.SOURCE, digest)
        if durable:
            await self._make_durable(item, digest)
        if joins or not decoded:
            return Stored(item, digest, False)
        return Stored(item, digest, True, made.new_frames, made.new_bytes)

    async def _find(self, alias: Digest) -> _Made | None:
        """The object of an alias, if its bytes are here; a lost one is made again from the source."""
        item = await self.index.find_object(alias)
        if item is None or not await self.holds(object_blobs(item)):
            return None
        return _Made(item)

    async def _make(self, alias: Digest, digest: Digest, source: Source, contract: DecodeContract) -> _Made:
        for _ in range(_TRIES):
            kept = await self._decoder.decode(
                source, contract, lambda clip: self._keep(alias, digest, source, clip)
            )
            self.counters.add("decodes")
            new = await self._commit(kept, source)
            if new is not None:
                if self.config.shared_memory_when == "put" and len(kept.record.item.frames) > 1:
                    with suppress(OmnifleetError):  # evicted already: whoever reads it is told so
                        await self.map_frames(kept.record.item)
                return _Made(kept.record.item, len(new), sum(new))
        raise retryable(
            Reason.OVERLOADED, "frames are evicted as fast as they are stored", knob="media.disk_bytes"
        )

    async def _commit(self, kept: _Kept, source: Source) -> list[int] | None:
        """Have the index name an object. Answers the sizes of its new frames; None if some have gone meanwhile."""
        record = kept.record
        if kept.lacking:
            return await self.write(kept.lacking, _beside(record, source), lambda: self._index_object(record))
        async with self.store.gate.writing():
            if not self._is_here(kept):
                return None
            await self._index_object(record)
        return kept.new

    def _keep(self, alias: Digest, digest: Digest, source: Source, clip: Decoded) -> _Kept:
        """Address what was decoded and, if there clearly is room, write it; in the decoder's thread.

        Nothing names these blobs yet: they may be collected as orphans until the index does. Uploads to an object
        store take long, so they are not made here.
        """
        width, height = clip.size
        disk, removals = self.store.disk, self.store.disk.removals
        fits = disk.used + clip.bytes + len(source.data) <= self.config.disk_bytes
        early = fits and self.store.objects is None
        only = early and clip.count == 1  # written with what lies beside it

        def kept(i: int) -> tuple[Blob, int, bool, bytes | memoryview]:
            """Blob of a frame, its bytes, whether it was written and new, and what has yet to be written."""
            frame = clip.frame(i)
            track = clip.kind is MediaKind.AUDIO
            name = track_digest(frame, height) if track else frame_digest(frame)
            blob, data = frame_blob(name, height, width), frame.data.cast("B")
            if early and not only:
                return blob, len(data), self.store.write_early([(blob, data)], of_clip=True)[0], b""
            return blob, len(data), False, data if only else bytes(data)

        taken = list(self._frames.map(kept, range(clip.count))) if clip.count > 1 else [kept(0)]
        frames = [blob.digest for blob, _, _, _ in taken]
        new = [size for _, size, was_new, _ in taken if was_new]
        unwritten = {blob.digest: (blob, data) for blob, _, _, data in taken if data}
        item = MediaObject(
            kind=clip.kind,
            frames=tuple(frames),
            width=width,
            height=height,
            timestamps_us=timestamps_us(clip.timestamps_s),
            facts={"mime": source.type.mime, "source_bytes": str(len(source.data)), **clip.facts},
        )
        record = Record(item, alias, digest, len(source.data))
        if not early:
            return _Kept(record, [], list(unwritten.values()))
        placed = self.store.write_early([*unwritten.values(), *_beside(record, source)])
        if only and placed[0]:
            new = [clip.bytes]
        return _Kept(record, new, [], removals)

    def _is_here(self, kept: _Kept) -> bool:
        """Whether all that was written early still is; the gate is held."""
        if self.store.disk.removals == kept.removals:
            return True
        record = kept.record
        blobs = [*object_blobs(record.item), source_blob(record.source)]
        return all(self.store.disk.has(blob) for blob in blobs)

    async def _index_object(self, record: Record) -> None:
        source = (record.source, record.source_bytes)
        await self.index.write_object(record.item, record.alias, now_ms(), source)

    async def _make_durable(self, item: MediaObject, source: Digest) -> None:
        blobs = [*object_blobs(item), source_blob(source)]
        await asyncio.to_thread(self.store.sync, blobs)
        await self.index.sync()


def _beside(record: Record, source: Source) -> list[Piece]:
    """What is stored beside the frames of an object."""
    manifest = manifest_blob(record.item.digest), record_bytes(record)
    return [manifest, (source_blob(record.source), source.data)]


async def _computed(size: int, digest: Callable[[], Answer]) -> Answer:
    """What `digest` answers for `size` bytes, off the event loop if that takes long."""
    return digest() if size <= _SHORT_BYTES else await asyncio.to_thread(digest)
