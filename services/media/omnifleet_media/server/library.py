"""The library: sources in, objects and segments out; each made once, however many ask."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

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
from omnifleet_media.decode.request import Decoder
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
_SHORT_BYTES = 1 << 20  # hashed in less time than it takes to hand the bytes to a thread
Answer = TypeVar("Answer")
Piece = tuple[Blob, bytes | memoryview]
Array = npt.NDArray[Any]
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
class _Frame:
    """A frame or track of `size` bytes that was decoded. new: it was written, and was not here before.

    data: its bytes, if they have yet to be written; else they were here a moment ago.
    """

    blob: Blob
    size: int
    new: bool = False
    data: bytes = b""


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
            clip = await self._decoder.decode(source, contract, self._keep)
            self.counters.add("decodes")
            width, height = clip.size
            item = MediaObject(
                kind=clip.kind,
                frames=tuple(frame.blob.digest for frame in clip.frames),
                width=width,
                height=height,
                timestamps_us=timestamps_us(clip.timestamps_s),
                facts={"mime": source.type.mime, "source_bytes": str(len(source.data)), **clip.facts},
            )
            record = Record(item, alias, digest, len(source.data))
            new = await self._write_object(record, clip.frames, source)
            if new is not None:
                return _Made(item, len(new), sum(new))
        raise retryable(
            Reason.OVERLOADED, "frames are evicted as fast as they are stored", knob="media.disk_bytes"
        )

    def _keep(self, frame: Array, sample_rate: int) -> _Frame:
        """Address a decoded frame or track and, if there clearly is room, write it; in the decoder's thread."""
        if sample_rate:
            digest, height, width = track_digest(frame, sample_rate), sample_rate, len(frame)
        else:
            digest, (height, width, _) = frame_digest(frame), frame.shape
        blob, size, data = frame_blob(digest, height, width), frame.nbytes, frame.data.cast("B")
        if self.store.objects is not None or self.store.disk.used + size > self.config.disk_bytes:
            return _Frame(blob, size, data=bytes(data))
        return _Frame(blob, size, new=self.store.write_early(blob, data))

    async def _write_object(
        self, record: Record, frames: Sequence[_Frame], source: Source
    ) -> list[int] | None:
        """Answers the bytes of each frame that is new here; None if one that was here has gone meanwhile."""
        pieces: dict[Digest, _Frame] = {}
        for frame in frames:
            pieces.setdefault(frame.blob.digest, frame)
        here = [frame for frame in pieces.values() if not frame.data]
        lacking = [(frame.blob, frame.data) for frame in pieces.values() if frame.data]
        kept: list[Piece] = [
            (manifest_blob(record.item.digest), record_bytes(record)),
            (source_blob(record.source), source.data),
        ]

        async def commit() -> bool:
            if not all(self.store.disk.has(frame.blob) for frame in here):
                return False
            await self._index_object(record)
            return True

        written = await self._write(lacking, kept, commit)
        return None if written is None else [*written, *(frame.size for frame in here if frame.new)]

    async def _index_object(self, record: Record) -> None:
        source = (record.source, record.source_bytes)
        await self.index.write_object(record.item, record.alias, now_ms(), source)

    async def _make_durable(self, item: MediaObject, source: Digest) -> None:
        blobs = [*object_blobs(item), source_blob(source)]
        await asyncio.to_thread(self.store.sync, blobs)
        await self.index.sync()

    async def _write(
        self, pieces: Sequence[Piece], kept: Sequence[Piece], commit: Callable[[], Awaitable[bool]]
    ) -> list[int] | None:
        """Bytes first, then the index: a kill in between leaves orphans, never a promise without bytes.

        Answers the sizes of those of `pieces` that were not here before; `kept` is written with them. None if `commit`
        would not.
        """
        new = [len(data) for blob, data in pieces if not self.store.disk.has(blob)]
        room = sum(new) + sum(len(data) for blob, data in kept if not self.store.disk.has(blob))
        await self.retention.make_room(room)
        async with self.store.gate.writing():
            await asyncio.to_thread(self.store.write, [*pieces, *kept])
            return new if await commit() else None

    # ------------------------------------------------------------------ out

    async def read(self, digest: Digest) -> MediaObject:
        """A media object. Raises OmnifleetError: NOT_FOUND; UNAVAILABLE while the index is told what is here."""
        item = await self.index.read_object(digest) or await self.recovery.restore(digest)
        if item is None:
            await self.retention.refuse_unless_known()
            raise OmnifleetError(
                Reason.NOT_FOUND, f"no media object {digest or '(no digest given)'} is here; upload it"
            )
        self.retention.used(Unit.OBJECT, digest)
        return item

    async def blob(self, kind: Kind, digest: Digest) -> Blob:
        """A known blob. Raises OmnifleetError: NOT_FOUND; UNAVAILABLE while the index is told what is here."""
        blob = await find_blob(self.index, kind, digest)
        if blob is None:
            await self.retention.refuse_unless_known()
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

        async def commit() -> bool:
            await self.index.write_segment(record, now_ms())
            return True

        await self._write([(blob, body)], [], commit)
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
