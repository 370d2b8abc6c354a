"""Client of the media service: pictures in, references, pixels and model-ready tensors out.

On the service's host, frames and segments are mapped from its shared memory, read-only and without a copy; elsewhere
they are streamed and checked against their digests.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import numpy.typing as npt

import omnifleet
from omnifleet.address import digest_bytes, frame_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.flight import SingleFlight
from omnifleet.processor import ImageProcessorSpec
from omnifleet.types import Digest, Lease, MediaKind, MediaRef
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import (
    counters_from_wire,
    kind_to_wire,
    lease_from_wire,
    media_from_wire,
    media_to_wire,
)
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from omnifleet.wire.server import CHUNK_BYTES

Answer = TypeVar("Answer")
Tensors = dict[str, npt.NDArray[Any]]

_DEADLINE_S = 60.0
_CACHE_BYTES = 256 << 20
_INFOS = 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_PASSING = frozenset({Reason.UNAVAILABLE, Reason.OVERLOADED, Reason.DRAINING})
_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "|u1"}


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """What a manifest says. timestamps_s: seconds, clips only; bytes: of the canonical frames."""

    ref: MediaRef
    frame_digests: tuple[Digest, ...]
    timestamps_s: tuple[float, ...]
    width: int
    height: int
    bytes: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Model-ready tensors of one media object under one processor; the arrays are read-only.

    tensors: for the Qwen2-VL family pixel_values float32 [patches, patch values] and image_grid_thw int64 [1, 3].
    token_count: placeholder tokens in a prompt. grid: (t, h, w) in patches. mapped: shares the service's memory.
    """

    key: Digest
    fingerprint: Digest
    token_count: int
    grid: tuple[int, ...]
    tensors: Tensors
    bytes: int
    mapped: bool


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


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The same for every service: state, uptime in seconds, counters and facts."""

    service: str
    version: str
    instance: str
    uptime_s: float
    state: str
    counters: dict[str, float]
    facts: dict[str, str]


class MediaClient:
    """Every call has a deadline of `deadline_s` seconds, inside which passing failures are retried."""

    def __init__(
        self, channel: grpc.aio.Channel, *, deadline_s: float, cache_bytes: int, same_host: bool
    ) -> None:
        self._stub: Any = MediaStub(channel)  # type: ignore[no-untyped-call]
        self._deadline_s = deadline_s
        self._same_host = same_host
        self._segments = _Cache(cache_bytes)
        self._infos: OrderedDict[Digest, MediaInfo] = OrderedDict()
        self._flights: SingleFlight[tuple[str, str, str], Segment] = SingleFlight()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        address: str,
        secret: str = "",
        *,
        name: str = "client",
        deadline_s: float = _DEADLINE_S,
        cache_bytes: int = _CACHE_BYTES,
        same_host: bool = True,
    ) -> AsyncIterator[MediaClient]:
        """Connect to "host:port" and shake hands.

        cache_bytes: segments kept in this process. same_host False: never try to map the service's memory.
        Raises OmnifleetError(UNAVAILABLE) at the deadline, CONTRACT_MISMATCH, UNAUTHENTICATED.
        """
        async with open_channel(address, secret) as channel:
            client = cls(channel, deadline_s=deadline_s, cache_bytes=cache_bytes, same_host=same_host)
            hello = common_pb2.HandshakeRequest(contract=omnifleet.CONTRACT, client=name)
            await client._unary("Handshake", hello)
            try:
                yield client
            finally:
                await client._flights.close()

    # ------------------------------------------------------------------ pictures in

    async def put_image(self, data: bytes, run: str, durable: bool = False) -> MediaRef:
        """Store a picture: the bytes of its file, or a data URL. Equal pixels give equal references.

        durable: the answer waits until the object would survive a power cut, not just a kill of the service.
        Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, DISK_FULL.
        """
        reply = await self.put(data, run, durable=durable)
        return media_from_wire(reply.ref)

    async def put(
        self,
        data: bytes,
        run: str,
        *,
        kind: MediaKind = MediaKind.IMAGE,
        contract: media_pb2.DecodeContract | None = None,
        durable: bool = False,
        lease_owner: str = "",
        lease_ttl_ms: int = 0,
    ) -> media_pb2.PutReply:
        """Store a source and have it decoded; everything the wire offers. With `lease_owner`, leased at once."""
        header = media_pb2.PutHeader(
            kind=kind_to_wire(kind),
            run=run,
            contract=contract,
            lease_owner=lease_owner,
            lease_ttl_ms=lease_ttl_ms,
            durability=media_pb2.DURABILITY_DURABLE if durable else media_pb2.DURABILITY_MEMORY,
        )
        return await self._retry(lambda left: self._stub.Put(_put_requests(header, data), timeout=left))

    # ------------------------------------------------------------------ objects and pixels out

    async def info(self, ref: MediaRef) -> MediaInfo:
        """The manifest of an object; asked once, since an address never changes its meaning. Raises NOT_FOUND."""
        info = self._infos.get(ref.digest)
        if info is None:
            info = self._infos[ref.digest] = (await self.stat(ref.digest)).info
            if len(self._infos) > _INFOS:
                self._infos.popitem(last=False)
        return info

    async def stat(self, digest: str) -> Stat:
        """An object, its leases and tiers. Raises NOT_FOUND."""
        reply = await self._unary("Stat", media_pb2.StatRequest(digest=digest))
        return Stat(_info(reply.info), reply.leases, tuple(reply.tiers))

    async def has(self, digests: Sequence[str]) -> list[bool]:
        """For each media digest, whether the service can serve it."""
        return list((await self._unary("Has", media_pb2.HasRequest(digests=digests))).present)

    async def frame(self, ref: MediaRef, i: int = 0) -> npt.NDArray[np.uint8]:
        """Frame `i` of an object: uint8 RGB (H, W, 3), read-only. Raises NOT_FOUND, MEDIA_LOST, CORRUPT."""
        info = await self.info(ref)
        if not 0 <= i < len(info.frame_digests):
            raise OmnifleetError(
                Reason.NOT_FOUND, f"{ref.url} has frames 0 to {len(info.frame_digests) - 1}, not {i}"
            )
        digest = info.frame_digests[i]
        buffer, mapped = await self.fetch(media_pb2.OBJECT_PART_FRAME, digest)
        pixels = np.frombuffer(buffer, np.uint8).reshape(info.height, info.width, 3)
        if not mapped and frame_digest(pixels) != digest:
            raise _changed_on_the_way(digest)
        return pixels

    async def fetch(self, part: media_pb2.ObjectPart, digest: str) -> tuple[memoryview, bool]:
        """The bytes of one stored part, and whether they are mapped (else: copied here, not yet checked)."""
        return await self._retry(lambda left: self._fetch(part, digest, left))

    # ------------------------------------------------------------------ segments

    async def segment(self, ref: MediaRef, spec: ImageProcessorSpec, run: str) -> Segment:
        """The model-ready tensors of `ref` under `spec`: made once per fleet, mapped or cached here.

        Concurrent calls for one key share one request. Raises NOT_FOUND, MEDIA_LOST, INVALID_REQUEST, UNSUPPORTED.
        """
        key = (ref.digest, spec.class_name, spec.config_json)
        kept = self._segments.get(key)
        if kept is not None:
            return kept
        return await self._flights.do(key, lambda: self._load_segment(key, ref, spec, run))

    async def _load_segment(
        self, key: tuple[str, str, str], ref: MediaRef, spec: ImageProcessorSpec, run: str
    ) -> Segment:
        request = media_pb2.SegmentRequest(
            ref=media_to_wire(ref),
            processor=media_pb2.ProcessorSpec(class_name=spec.class_name, config_json=spec.config_json),
            run=run,
            same_host=self._same_host,
        )
        reply = await self._unary("Segment", request)
        buffer, mapped = _map(reply.shm_path, reply.bytes) if reply.shm_path else None, True
        if buffer is None:
            buffer, mapped = await self.fetch(media_pb2.OBJECT_PART_SEGMENT, reply.key)
        if not mapped and digest_bytes(buffer, "tensors") != reply.content_digest:
            raise _changed_on_the_way(reply.key)
        segment = Segment(
            key=Digest(reply.key),
            fingerprint=Digest(reply.fingerprint),
            token_count=reply.token_count,
            grid=tuple(reply.grid),
            tensors=read_tensors(buffer),
            bytes=reply.bytes,
            mapped=mapped,
        )
        self._segments.keep(key, segment)
        return segment

    # ------------------------------------------------------------------ leases

    async def take_lease(self, digests: Iterable[str], owner: str, run: str, ttl_s: float) -> Lease:
        """Hold media objects (or segments, sources) for `ttl_s` seconds: nothing leased is evicted.

        A leased media object holds its frames and its segments too. All or nothing. Raises MEDIA_LOST for content
        that is not there.
        """
        request = media_pb2.TakeLeaseRequest(
            run=run, owner=owner, ttl_ms=math.ceil(ttl_s * 1000), digests=list(digests)
        )
        return lease_from_wire(await self._unary("TakeLease", request))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> Lease:
        """Extend a lease to `ttl_s` seconds from now. Raises NOT_FOUND once it has expired."""
        request = media_pb2.RenewLeaseRequest(id=lease.id, ttl_ms=math.ceil(ttl_s * 1000))
        return lease_from_wire(await self._unary("RenewLease", request))

    async def release_lease(self, lease: Lease) -> bool:
        """Give a lease back; False if it was gone already."""
        reply = await self._unary("ReleaseLease", media_pb2.ReleaseLeaseRequest(id=lease.id))
        return bool(reply.released)

    # ------------------------------------------------------------------ operators

    async def status(self) -> ServiceStatus:
        """State, counters and facts of the service."""
        m = await self._unary("Status", common_pb2.StatusRequest())
        counters = counters_from_wire(m.counters)
        return ServiceStatus(m.service, m.version, m.instance, m.uptime_s, m.state, counters, dict(m.facts))

    async def collect(self, target_bytes: int, dry_run: bool = False) -> Collected:
        """Shrink the disk tier to `target_bytes` (unleased, least recently used first) and remove orphans."""
        request = media_pb2.CollectRequest(target_bytes=target_bytes, dry_run=dry_run)
        reply = await self._unary("Collect", request)
        return Collected(reply.freed_bytes, reply.removed, reply.orphans)

    async def verify(self, digests: Iterable[str] = ()) -> Verified:
        """Read blobs back (none given: all) and compare with their digests; wrong ones are removed."""
        reply = await self._unary("Verify", media_pb2.VerifyRequest(digests=list(digests)))
        return Verified(reply.checked, tuple(Digest(d) for d in reply.corrupt))

    # ------------------------------------------------------------------ calls

    async def _unary(self, method: str, request: Any) -> Any:
        return await self._retry(lambda left: getattr(self._stub, method)(request, timeout=left))

    async def _retry(self, call: Callable[[float], Awaitable[Answer]]) -> Answer:
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                with remote_errors():
                    return await call(max(end - time.monotonic(), 0.001))
            except OmnifleetError as error:
                wait = max(pause * random.uniform(0.5, 1.5), error.retry_after_ms / 1000)
                if error.reason not in _PASSING or time.monotonic() + wait >= end:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _fetch(self, part: media_pb2.ObjectPart, digest: str, left: float) -> tuple[memoryview, bool]:
        request = media_pb2.GetRequest(part=part, digest=digest, same_host=self._same_host)
        header, chunks = await self._open_get(request, left)
        if header.shm_path:
            buffer = _map(header.shm_path, header.bytes)
            if buffer is not None:
                return buffer, True
            request.same_host = False  # another host, another user, or evicted since: take the stream
            header, chunks = await self._open_get(request, left)
        data = bytearray(header.bytes)
        filled = 0
        async for reply in chunks:
            piece = reply.chunk.data
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled != header.bytes:
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"stream of {digest} ended at {filled} bytes", retryable=True
            )
        return memoryview(data).toreadonly(), False

    async def _open_get(
        self, request: media_pb2.GetRequest, left: float
    ) -> tuple[media_pb2.GetHeader, AsyncIterator[Any]]:
        replies = aiter(self._stub.Get(request, timeout=left))
        async for first in replies:
            if first.WhichOneof("part") == "header":
                return first.header, replies
            break
        raise OmnifleetError(Reason.UNAVAILABLE, f"stream of {request.digest} has no header", retryable=True)


class _Cache:
    """Segments by key, least recently used out first, bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._kept: OrderedDict[tuple[str, str, str], Segment] = OrderedDict()

    def get(self, key: tuple[str, str, str]) -> Segment | None:
        segment = self._kept.get(key)
        if segment is not None:
            self._kept.move_to_end(key)
        return segment

    def keep(self, key: tuple[str, str, str], segment: Segment) -> None:
        self._kept[key] = segment
        self._used += segment.bytes
        while self._used > self._limit and self._kept:
            self._used -= self._kept.popitem(last=False)[1].bytes


def read_tensors(buffer: memoryview) -> Tensors:
    """The tensors of a safetensors file as read-only arrays over `buffer`, without a copy. Raises CORRUPT."""
    try:
        size = int.from_bytes(buffer[:8], "little")
        header: Mapping[str, Any] = json.loads(bytes(buffer[8 : 8 + size]))
        body = buffer[8 + size :]
        return {name: _array(body, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as error:
        raise OmnifleetError(Reason.CORRUPT, f"not a safetensors file that we can read: {error!r}") from error


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    array = np.frombuffer(body[start:end], np.dtype(_DTYPES[entry["dtype"]])).reshape(entry["shape"])
    array.flags.writeable = False
    return array


def _map(path: str, size: int) -> memoryview | None:
    """A read-only map of a file of the service's shared memory; None if it is not ours to see or has gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != size:
            return None
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)


async def _put_requests(header: media_pb2.PutHeader, data: bytes) -> AsyncIterator[media_pb2.PutRequest]:
    yield media_pb2.PutRequest(header=header)
    for offset in range(0, len(data), CHUNK_BYTES):
        piece = data[offset : offset + CHUNK_BYTES]
        last = offset + len(piece) == len(data)
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=piece, offset=offset, last=last))


def _info(message: media_pb2.ObjectInfo) -> MediaInfo:
    return MediaInfo(
        ref=media_from_wire(message.ref),
        frame_digests=tuple(Digest(d) for d in message.frame_digests),
        timestamps_s=tuple(message.timestamps_s),
        width=message.width,
        height=message.height,
        bytes=message.bytes,
        facts=dict(message.facts),
    )


def _changed_on_the_way(digest: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.CORRUPT, f"{digest} arrived with other bytes than its digest says", retryable=True
    )
