"""The gRPC face of the library: proto/omnifleet/v1alpha/media.proto, method by method."""

# ruff: noqa: D102 -- the methods are documented there

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import omnifleet
from omnifleet.errors import OmnifleetError, invalid
from omnifleet.types import Digest
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.codec import (
    counters_to_wire,
    kind_from_wire,
    lease_to_wire,
    media_from_wire,
    media_to_wire,
)
from omnifleet.wire.errors import to_detail
from omnifleet.wire.media_pb2_grpc import MediaServicer
from omnifleet.wire.server import CHUNK_BYTES, INSTANCE, handshake
from omnifleet_media.address.contract import DecodeContract
from omnifleet_media.address.manifest import is_track
from omnifleet_media.index.port import Kind, SegmentRecord
from omnifleet_media.index.where import without_secrets
from omnifleet_media.ingest.slot import contract_for
from omnifleet_media.ingest.sniff import SourceType
from omnifleet_media.server.blobs import find_blob, frame_blob, manifest_blob, record_blob
from omnifleet_media.server.door import Door, PutOptions, Upload
from omnifleet_media.server.library import Stored
from omnifleet_media.server.pack import object_info
from omnifleet_media.server.retention import now_ms

_KINDS = {
    media_pb2.OBJECT_PART_FRAME: Kind.FRAME,
    media_pb2.OBJECT_PART_MANIFEST: Kind.MANIFEST,
    media_pb2.OBJECT_PART_SOURCE: Kind.SOURCE,
    media_pb2.OBJECT_PART_SEGMENT: Kind.SEGMENT,
}
_MANY = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


class MediaRpc(MediaServicer):
    """One method a call; errors are the library's own."""

    def __init__(self, door: Door) -> None:
        self._door, self._library = door, door.library
        self._started = time.monotonic()
        self.state = "starting"

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        reply = handshake(request, "media")
        reply.shared_folder = str(self._library.store.shared.root)
        return reply

    async def Put(self, requests: AsyncIterator[media_pb2.PutRequest], context: Any) -> media_pb2.PutReply:
        arriving = aiter(requests)
        first = await anext(arriving, media_pb2.PutRequest())
        if first.WhichOneof("part") != "header":
            raise invalid("put takes a header first")
        header = first.header
        with self._door.upload(header.bytes * 3 // 4) as upload:  # a data URL spends 4 characters on 3 bytes
            ended = False
            async for request in arriving:
                part, chunk = request.WhichOneof("part"), request.chunk
                if part != "chunk" or chunk.offset != upload.received or header.url or ended:
                    raise invalid(
                        "put takes one header, then chunks in order up to the last, and none after a header with a "
                        f"url; got {part} at byte {upload.received}"
                    )
                upload.add(chunk.data)
                self._library.counters.add("bytes_received", len(chunk.data))
                ended = chunk.last
            if upload.received and not ended:  # so ends the stream of a caller that went away, too
                raise invalid(f"the upload broke off at byte {upload.received}: its last chunk is missing")
            return await self._finish("media_put", upload, header)

    async def PutMany(self, request: media_pb2.PutManyRequest, context: Any) -> media_pb2.PutManyReply:
        header = request.header
        if header.url or header.bytes or len(request.sources) > _MANY:
            raise invalid(f"put_many takes at most {_MANY} sources, and a header with neither url nor bytes")
        outcomes = await asyncio.gather(*(self._outcome(data, header) for data in request.sources))
        return media_pb2.PutManyReply(outcomes=outcomes)

    async def _outcome(self, data: bytes, header: media_pb2.PutHeader) -> media_pb2.PutOutcome:
        try:
            with self._door.upload() as upload:
                upload.add(data)
                self._library.counters.add("bytes_received", len(data))
                return media_pb2.PutOutcome(reply=await self._finish("media_putmany", upload, header))
        except OmnifleetError as error:
            return media_pb2.PutOutcome(error=to_detail(error))

    async def _finish(self, boundary: str, upload: Upload, header: media_pb2.PutHeader) -> media_pb2.PutReply:
        source = await self._door.finish(upload, header.url)
        contract = contract_of(header.contract, header.kind, source.type)
        stored, lease = await self._door.put(boundary, source, contract, _options(header))
        reply = put_reply(stored, header.durability)
        if lease is not None:
            reply.lease.CopyFrom(lease_to_wire(lease))
        return reply

    async def Decode(self, request: media_pb2.DecodeRequest, context: Any) -> media_pb2.PutReply:
        stored = await self._library.decode(
            checked(request.source_digest), lambda kind: contract_of(request.contract, request.kind, kind)
        )
        self._door.stored("media_decode", stored)
        return put_reply(stored, media_pb2.DURABILITY_MEMORY)

    async def Get(self, request: media_pb2.GetRequest, context: Any) -> AsyncIterator[media_pb2.GetReply]:
        kind = _KINDS.get(request.part)
        if kind is None:
            raise invalid("get needs a part: frame, manifest, source or segment")
        digest = checked(request.digest)
        blob = await self._library.blob(kind, digest)
        header = media_pb2.GetHeader()
        shape = await self._library.index.read_frame(digest) if kind is Kind.FRAME else None
        if request.same_host and not request.offset and not request.length:
            header.shm_path = await self._library.map_path(blob)
        if header.shm_path:
            size = await asyncio.to_thread(_size_of, header.shm_path)
            if size is not None:
                header.bytes = size
                _describe(header, shape, size)
                self._door.read("media_get", size, mapped=True, key=kind)
                yield media_pb2.GetReply(header=header)
                return
            header.shm_path = ""  # left the tier since: stream it
        data = await asyncio.to_thread(self._library.store.open, blob)
        if request.offset > len(data):
            raise invalid(f"offset {request.offset} is beyond the {len(data)} bytes of {kind} {digest}")
        end = min(request.offset + request.length, len(data)) if request.length else len(data)
        header.bytes = end - request.offset
        _describe(header, shape, len(data))
        self._door.read("media_get", header.bytes, mapped=False, key=kind)
        yield media_pb2.GetReply(header=header)
        for offset in range(request.offset, end, CHUNK_BYTES):
            piece = bytes(data[offset : min(offset + CHUNK_BYTES, end)])
            last = offset + len(piece) == end
            yield media_pb2.GetReply(chunk=common_pb2.Chunk(data=piece, offset=offset, last=last))
            self._library.counters.add("bytes_streamed", len(piece))

    async def Has(self, request: media_pb2.HasRequest, context: Any) -> media_pb2.HasReply:
        return media_pb2.HasReply(present=[await self._has(request.part, Digest(d)) for d in request.digests])

    async def _has(self, part: int, digest: Digest) -> bool:
        kind = _KINDS.get(part)  # type: ignore[call-overload]
        if kind is not None:
            blob = await find_blob(self._library.index, kind, digest)
            return blob is not None and await self._library.holds([blob])
        item = await self._library.index.read_object(digest)
        if item is None:
            return False
        frames = [frame_blob(frame, item.height, item.width) for frame in item.frames]
        return await self._library.holds([manifest_blob(digest), *frames])

    async def Stat(self, request: media_pb2.StatRequest, context: Any) -> media_pb2.StatReply:
        digest = checked(request.digest)
        item = await self._library.read(digest)
        if request.same_host:
            path = await self._library.map_frames(item)
            return media_pb2.StatReply(info=object_info(item), shm_path=path)
        tiers, leases = await asyncio.gather(
            self._library.tiers(frame_blob(item.frames[0], item.height, item.width)),
            self._library.index.count_leases(digest, now_ms()),
        )
        return media_pb2.StatReply(info=object_info(item), leases=leases, tiers=tiers)

    async def TakeLease(self, request: media_pb2.TakeLeaseRequest, context: Any) -> common_pb2.Lease:
        digests = [checked(d) for d in request.digests]
        lease = await self._library.retention.take_lease(request.run, request.owner, request.ttl_ms, digests)
        return lease_to_wire(lease)

    async def RenewLease(self, request: media_pb2.RenewLeaseRequest, context: Any) -> common_pb2.Lease:
        return lease_to_wire(await self._library.retention.renew_lease(request.id, request.ttl_ms))

    async def ReleaseLease(
        self, request: media_pb2.ReleaseLeaseRequest, context: Any
    ) -> media_pb2.ReleaseLeaseReply:
        return media_pb2.ReleaseLeaseReply(released=await self._library.retention.release_lease(request.id))

    async def Segment(self, request: media_pb2.SegmentRequest, context: Any) -> media_pb2.SegmentReply:
        checked(request.ref.digest)
        spec = request.processor
        record, made = await self._library.segments.find_or_make(
            media_from_wire(request.ref), spec.class_name, spec.config_json, spec.fingerprint
        )
        path = await self._library.map_path(record_blob(record)) if request.same_host else ""
        self._door.segment("media_segment", record, made=made)
        return segment_reply(record, made, path, await self._library.segments.moments_s(record))

    async def Collect(self, request: media_pb2.CollectRequest, context: Any) -> media_pb2.CollectReply:
        found = await self._library.retention.collect(request.target_bytes, dry_run=request.dry_run)
        return media_pb2.CollectReply(
            freed_bytes=found.freed_bytes, removed=found.removed, orphans=found.orphans
        )

    async def Verify(self, request: media_pb2.VerifyRequest, context: Any) -> media_pb2.VerifyReply:
        checked_count, corrupt = await self._library.retention.verify([checked(d) for d in request.digests])
        return media_pb2.VerifyReply(checked=checked_count, corrupt=corrupt)

    async def Status(self, request: common_pb2.StatusRequest, context: Any) -> common_pb2.ServiceStatus:
        config, store = self._library.config, self._library.store
        counters = {
            **self._library.counters.snapshot(),
            **self._door.payload.snapshot(),
            "objects": await self._library.index.count_objects(),
        }
        return common_pb2.ServiceStatus(
            service="media",
            version=omnifleet.__version__,
            instance=INSTANCE,
            uptime_s=time.monotonic() - self._started,
            state=self.state,
            counters=counters_to_wire(counters),
            facts={
                "index": without_secrets(config.index),
                "disk": f"{store.disk.used} of {config.disk_bytes} bytes",
                "shared_memory": f"{store.shared.used} of {config.shared_memory_bytes} bytes",
            },
        )


def _options(header: media_pb2.PutHeader) -> PutOptions:
    durable = header.durability == media_pb2.DURABILITY_DURABLE
    return PutOptions(header.run, durable, header.lease_owner, header.lease_ttl_ms)


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _describe(header: media_pb2.GetHeader, shape: tuple[int, int] | None, size: int) -> None:
    """Shape and dtype of a frame or a track."""
    if shape is None:
        return
    height, width = shape
    header.dtype = "float32" if is_track(height, width, size) else "uint8"
    header.shape.extend([width] if header.dtype == "float32" else [height, width, 3])


def checked(digest: str) -> Digest:
    """A well-formed digest. Raises OmnifleetError(INVALID_REQUEST)."""
    if not _DIGEST.fullmatch(digest):
        raise invalid(f"{digest[:80]!r} is not a digest of 64 lower-case hex characters")
    return Digest(digest)


def contract_of(asked: media_pb2.DecodeContract, believed: int, found: SourceType) -> DecodeContract:
    """The contract for what the bytes are; the caller's belief only matters where bytes can be both.

    Raises OmnifleetError: UNSUPPORTED, INVALID_REQUEST.
    """
    return contract_for(asked, kind_from_wire(believed), found)


def put_reply(stored: Stored, durability: media_pb2.Durability) -> media_pb2.PutReply:
    """Outcome of a put on the wire."""
    return media_pb2.PutReply(
        ref=media_to_wire(stored.item.ref),
        source_digest=stored.source,
        decoded=stored.decoded,
        durability=durability or media_pb2.DURABILITY_MEMORY,
        info=object_info(stored.item),
    )


def segment_reply(
    record: SegmentRecord, made: bool, path: str, times_s: Sequence[float]
) -> media_pb2.SegmentReply:
    """A segment on the wire."""
    return media_pb2.SegmentReply(
        key=record.key,
        bytes=record.bytes,
        token_count=record.token_count,
        grid=record.grid,
        shm_path=path,
        computed=made,
        fingerprint=record.fingerprint,
        content_digest=record.content,
        times_s=times_s,
    )
