"""The library: sources in, objects and segments out; each made once, however many ask."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from omnifleet.address import (
    alias_key,
    digest_bytes,
    frame_digest,
    processor_fingerprint,
    segment_key,
    source_digest,
    track_digest,
)
from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.flight import SingleFlight
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Digest, Lease, MediaKind, MediaRef
from omnifleet_media.address.contract import DecodeContract
from omnifleet_media.address.manifest import MediaObject, timestamps_us
from omnifleet_media.decode.request import Decoded, Decoder
from omnifleet_media.index.port import Index, Kind, SegmentRecord, Unit
from omnifleet_media.ingest.sniff import SourceType, sniff
from omnifleet_media.ingest.source import Source
from omnifleet_media.sandbox.pool import ProcessPool
from omnifleet_media.segment.work import library as segment_library
from omnifleet_media.segment.work import takes_clips
from omnifleet_media.server.blobs import (
    find_blob,
    frame_blob,
    holds,
    manifest_blob,
    object_blobs,
    record_blob,
    segment_blob,
    source_blob,
)
from omnifleet_media.server.flights import Flights
from omnifleet_media.server.record import Record, record_bytes
from omnifleet_media.server.recovery import Recovery
from omnifleet_media.server.retention import Retention, now_ms
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.tiers import Store

log = logging.getLogger("omnifleet.media")

_CONFIG_BYTES = 64 << 10
_TRIES = 3
_FRAME_THREADS = 4  # frames of a clip that are hashed and written at once
_SHORT_BYTES = 1 << 20  # hashed in less time than it takes to hand the bytes to a thread
Answer = TypeVar("Answer")
Piece = tuple[Blob, bytes | memoryview]
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


class Library:
    """Puts the rooms together. One event loop; files and hashing in threads; decoding and processors in processes."""

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
        self.config, self.store, self.index, self.retention = config, store, index, retention
        self.counters = counters
        self._decoder, self._processors = decoder, processors
        self.recovery = Recovery(store, index, counters)
        self._flights = Flights(index)
        self._frames = ThreadPoolExecutor(_FRAME_THREADS, thread_name_prefix="media-frames")
        self._decodes: SingleFlight[Digest, tuple[_Made, bool]] = SingleFlight()
        self._segments: SingleFlight[Digest, tuple[SegmentRecord, bool]] = SingleFlight()

    async def warm(self) -> None:
        """Start the first processes ahead of the first call; where there is no transformers, that is no fault."""
        try:
            await self._decoder.pictures.warm()
            if self.config.processors:
                segment_library()
                await self._processors.warm()
        except OmnifleetError as error:
            log.warning("%s", error)

    async def close(self) -> None:
        """Stop what is being made, end all processes, write last uses."""
        await self._decodes.close()
        await self._segments.close()
        await self._decoder.close()
        await self._processors.close()
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
                return _Made(kept.record.item, len(new), sum(new))
        raise retryable(
            Reason.OVERLOADED, "frames are evicted as fast as they are stored", knob="media.disk_bytes"
        )

    async def _commit(self, kept: _Kept, source: Source) -> list[int] | None:
        """Have the index name an object. Answers the sizes of its new frames; None if some have gone meanwhile."""
        record = kept.record
        if kept.lacking:
            return await self._write(
                kept.lacking, _beside(record, source), lambda: self._index_object(record)
            )
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
                return blob, len(data), self.store.write_early([(blob, data)])[0], b""
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

    async def _write(
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

    # ------------------------------------------------------------------ out

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
        """Where a same-host reader may map the first frame of an object; all others are in the same folder then, if
        they fit. "" if they do not.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT.
        """
        if item.bytes > self.config.shared_memory_bytes:
            return ""
        blobs = [frame_blob(frame, item.height, item.width) for frame in dict.fromkeys(item.frames)]
        paths = [self.store.shared.path(blob) for blob in blobs]
        if None in paths:
            paths = await asyncio.to_thread(lambda: [self.store.map_path(blob) for blob in blobs])
        self.counters.add("shm_maps", sum(path is not None for path in paths))
        return str(paths[0] or "")

    async def holds(self, blobs: Iterable[Blob]) -> bool:
        """Whether the bytes of all blobs are here, or in the object store."""
        return await holds(self.store, blobs)

    async def tiers(self, blob: Blob) -> list[str]:
        """Names of the tiers that hold a blob."""
        return await asyncio.to_thread(self.store.tiers, blob)

    # ------------------------------------------------------------------ segments

    async def segment(
        self, ref: MediaRef, class_name: str, config_json: str, claimed: str
    ) -> tuple[SegmentRecord, bool]:
        """Tensors of an object under a processor, and whether they were made now.

        claimed: the fingerprint that the caller expects, "" for any. Raises OmnifleetError: UNSUPPORTED,
        INVALID_REQUEST, CONTRACT_MISMATCH, NOT_FOUND, MEDIA_LOST.
        """
        if class_name not in self.config.processors:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"processor class {class_name!r} is not one of {', '.join(self.config.processors)}",
                knob="media.processors",
            )
        config = _parse_config(config_json)
        # The frames of a clip are chosen by its decode contract, before any processor sees them.
        sampling = "sampled" if takes_clips(class_name) else "still"
        fingerprint = processor_fingerprint(class_name, config, segment_library(), sampling)
        if claimed and claimed != fingerprint:
            raise OmnifleetError(
                Reason.CONTRACT_MISMATCH,
                f"this service makes segments with {segment_library()}, whose fingerprint is {fingerprint}, not {claimed}",
                knob="install matching versions of transformers",
            )
        key = segment_key(ref.digest, fingerprint)
        work = {"class_name": class_name, "config": config, "config_json": config_json}
        joins = self._segments.running(key)
        record, made = await self._segments.do(
            key,
            lambda: self._flights.find_or_make(
                key,
                lambda: self._find_segment(key),
                lambda: self._make_segment(ref.digest, key, fingerprint, work),
            ),
        )
        self.retention.used(Unit.SEGMENT, key)
        self.counters.add("segments_served")
        return record, made and not joins

    async def _find_segment(self, key: Digest) -> SegmentRecord | None:
        record = await self.index.read_segment(key)
        return record if record is not None and await self.holds([record_blob(record)]) else None

    async def _make_segment(
        self, media: Digest, key: Digest, fingerprint: Digest, work: Mapping[str, object]
    ) -> SegmentRecord:
        item = await self.read(media)
        wanted = MediaKind.VIDEO if takes_clips(str(work["class_name"])) else MediaKind.IMAGE
        if item.kind is not wanted:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"{work['class_name']} takes media of kind {wanted}, not {item.kind}"
            )
        shape = [len(item.frames), item.height, item.width, 3]
        answer, body = await self._processors.call({**work, "shape": shape}, await self._joined(item))
        self.counters.add("segments_computed")
        content = await asyncio.to_thread(digest_bytes, body, "tensors")
        record = SegmentRecord(
            key, media, fingerprint, answer["token_count"], tuple(answer["grid"]), len(body), content
        )
        blob = segment_blob(key, content)
        await self._write([(blob, body)], [], lambda: self.index.write_segment(record, now_ms()))
        return record

    async def _joined(self, item: MediaObject) -> memoryview:
        """All frames in order, one after the other."""
        opened = {digest: await self.open(Kind.FRAME, digest) for digest in dict.fromkeys(item.frames)}
        if len(item.frames) == 1:
            return opened[item.frames[0]]
        return memoryview(await asyncio.to_thread(b"".join, [opened[digest] for digest in item.frames]))

    async def moments_s(self, record: SegmentRecord) -> list[float]:
        """Seconds of the first frame of each temporal patch of a clip's segment; nothing for a picture's."""
        item = await self.index.read_object(record.media)
        if item is None or not item.timestamps_us or not record.grid:
            return []
        step = -(-len(item.timestamps_us) // record.grid[0])
        return [us / 1_000_000 for us in item.timestamps_us[::step]]


def _beside(record: Record, source: Source) -> list[Piece]:
    """What is stored beside the frames of an object."""
    manifest = manifest_blob(record.item.digest), record_bytes(record)
    return [manifest, (source_blob(record.source), source.data)]


async def _computed(size: int, digest: Callable[[], Answer]) -> Answer:
    """What `digest` answers for `size` bytes, off the event loop if that takes long."""
    return digest() if size <= _SHORT_BYTES else await asyncio.to_thread(digest)


def _parse_config(config_json: str) -> dict[str, object]:
    if len(config_json) > _CONFIG_BYTES:
        raise invalid(
            f"the processor's config has {len(config_json)} characters, at most {_CONFIG_BYTES} are allowed"
        )
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise invalid(f"the processor's config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise invalid("the processor's config is not a JSON object")
    return config
