"""The asyncio client of the media service."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import omnifleet
from omnifleet.client.media.answers import Collected, Verified, info_from_wire
from omnifleet.client.media.calls import MediaCalls
from omnifleet.client.media.many import put_all
from omnifleet.client.media.reading import MediaReader
from omnifleet.client.status import ServiceStatus, status_from_wire
from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.types import Digest, Lease, MediaKind, MediaRef
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import kind_to_wire, lease_from_wire, media_from_wire

_DEADLINE_S = 60.0
_CACHE_BYTES = 256 << 20


class MediaClient(MediaReader):
    """Everything that the service offers to callers; what is read is in `MediaReader`.

    Every call has a deadline of `deadline_s` seconds, inside which passing failures are retried.
    """

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
        verify_mapped: bool = False,
    ) -> AsyncIterator[MediaClient]:
        """Connect to "host:port" and shake hands.

        cache_bytes: frames and segments kept in this process. same_host False: never try to map the service's memory.
        verify_mapped: compare mapped bytes with their digest too (copied ones always are): some 0.1 ms for 200 KB.
        Raises OmnifleetError(UNAVAILABLE) at the deadline, CONTRACT_MISMATCH, UNAUTHENTICATED.
        """
        async with open_channel(address, secret) as channel:
            payload = PayloadMeter("media_client")
            client = cls(
                MediaCalls(channel, deadline_s, payload),
                payload,
                cache_bytes=cache_bytes,
                same_host=same_host,
                verify_mapped=verify_mapped,
            )
            hello = common_pb2.HandshakeRequest(contract=omnifleet.CONTRACT, client=name)
            answer = await client._calls.ask("Handshake", hello)
            if same_host and answer.shared_folder:
                client._shared.look_in(answer.shared_folder)
            try:
                yield client
            finally:
                await client.close()

    # ------------------------------------------------------------------ sources in

    async def put_image(self, data: bytes, run: str, durable: bool = False) -> MediaRef:
        """Store a picture: the bytes of its file, or a data URL. Equal pixels give equal references.

        durable: the answer waits until the object would survive a power cut, not just a kill of the service.
        Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED, DISK_FULL.
        """
        return media_from_wire((await self.put(data, run, durable=durable)).ref)

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
        header = _header(run, kind, contract, durable, lease_owner, lease_ttl_ms)
        header.bytes = len(data)
        return await self._put(header, data)

    async def put_many(
        self,
        sources: Sequence[bytes],
        run: str,
        *,
        kind: MediaKind = MediaKind.IMAGE,
        contract: media_pb2.DecodeContract | None = None,
        durable: bool = False,
        lease_owner: str = "",
        lease_ttl_ms: int = 0,
    ) -> list[media_pb2.PutReply | OmnifleetError]:
        """`put` for each source, several to a message: the way to bring in thousands. Answers in their order.

        A source that is refused has its error in its place and costs the others nothing. Raises OmnifleetError for
        what refuses a whole message.
        """
        header = _header(run, kind, contract, durable, lease_owner, lease_ttl_ms)
        outcomes = await put_all(self._calls, header, sources)
        for outcome in outcomes:
            if isinstance(outcome, media_pb2.PutReply):
                self._remember(info_from_wire(outcome.info))
        return outcomes

    async def put_url(
        self,
        url: str,
        run: str,
        *,
        kind: MediaKind = MediaKind.IMAGE,
        contract: media_pb2.DecodeContract | None = None,
        durable: bool = False,
        lease_owner: str = "",
        lease_ttl_ms: int = 0,
    ) -> media_pb2.PutReply:
        """Have the service read the source itself: http(s), file: or a path, as its `media.sources` allows.

        Raises OmnifleetError: INVALID_REQUEST if it may not, and what `put_image` raises.
        """
        header = _header(run, kind, contract, durable, lease_owner, lease_ttl_ms)
        header.url = url
        return await self._put(header, b"")

    async def decode(
        self,
        source_digest: str,
        run: str,
        *,
        kind: MediaKind = MediaKind.IMAGE,
        contract: media_pb2.DecodeContract | None = None,
    ) -> media_pb2.PutReply:
        """Decode a source that is stored (`PutReply.source_digest`) in one more way; its bytes are not sent again.

        Raises OmnifleetError: NOT_FOUND for a source that is not there, and what `put` raises.
        """
        request = media_pb2.DecodeRequest(
            source_digest=source_digest, kind=kind_to_wire(kind), contract=contract, run=run
        )
        reply: media_pb2.PutReply = await self._calls.ask("Decode", request)
        self._remember(info_from_wire(reply.info))
        return reply

    async def _put(self, header: media_pb2.PutHeader, data: bytes) -> media_pb2.PutReply:
        reply = await self._calls.put(header, data)
        self._remember(info_from_wire(reply.info))
        return reply

    # ------------------------------------------------------------------ leases

    async def take_lease(self, digests: Iterable[str], owner: str, run: str, ttl_s: float) -> Lease:
        """Hold media objects (or segments, sources) for `ttl_s` seconds: nothing leased is evicted.

        A leased media object holds its frames and its segments too. All or nothing. Raises MEDIA_LOST for content
        that is not there, LIMIT_EXCEEDED for what the run's quota does not allow.
        """
        request = media_pb2.TakeLeaseRequest(
            run=run, owner=owner, ttl_ms=math.ceil(ttl_s * 1000), digests=list(digests)
        )
        return lease_from_wire(await self._calls.ask("TakeLease", request))

    async def renew_lease(self, lease: Lease, ttl_s: float) -> Lease:
        """Extend a lease to `ttl_s` seconds from now. Raises NOT_FOUND once it has expired."""
        request = media_pb2.RenewLeaseRequest(id=lease.id, ttl_ms=math.ceil(ttl_s * 1000))
        return lease_from_wire(await self._calls.ask("RenewLease", request))

    async def release_lease(self, lease: Lease) -> bool:
        """Give a lease back; False if it was gone already."""
        reply = await self._calls.ask("ReleaseLease", media_pb2.ReleaseLeaseRequest(id=lease.id))
        return bool(reply.released)

    # ------------------------------------------------------------------ operators

    async def status(self) -> ServiceStatus:
        """State, counters and facts of the service."""
        return status_from_wire(await self._calls.ask("Status", common_pb2.StatusRequest()))

    async def collect(self, target_bytes: int, dry_run: bool = False) -> Collected:
        """Shrink the disk tier to `target_bytes` (unleased, least recently used first) and remove orphans."""
        request = media_pb2.CollectRequest(target_bytes=target_bytes, dry_run=dry_run)
        reply = await self._calls.ask("Collect", request)
        return Collected(reply.freed_bytes, reply.removed, reply.orphans)

    async def verify(self, digests: Iterable[str] = ()) -> Verified:
        """Read blobs back (none given: all) and compare with their digests; wrong ones are removed."""
        reply = await self._calls.ask("Verify", media_pb2.VerifyRequest(digests=list(digests)))
        return Verified(reply.checked, tuple(Digest(d) for d in reply.corrupt))


def _header(
    run: str,
    kind: MediaKind,
    contract: media_pb2.DecodeContract | None,
    durable: bool,
    lease_owner: str,
    lease_ttl_ms: int,
) -> media_pb2.PutHeader:
    return media_pb2.PutHeader(
        kind=kind_to_wire(kind),
        run=run,
        contract=contract,
        lease_owner=lease_owner,
        lease_ttl_ms=lease_ttl_ms,
        durability=media_pb2.DURABILITY_DURABLE if durable else media_pb2.DURABILITY_MEMORY,
    )
