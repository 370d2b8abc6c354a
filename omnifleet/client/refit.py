"""Client of a worker's Refit service: describe, stage, commit, abort, fetch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc.aio

from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import in_flight_to_wire, version_from_wire, version_to_wire
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.needs import NeedsBody, needs_from_wire

CALL_S = 10.0
"""Deadline of a call that moves nothing, seconds."""
_GRACE_S = 2.0
"""What a call is given beyond the deadline that the worker is told, so that its own error arrives."""


class Source(Protocol):
    """Where a worker fetches the buckets of a stage."""

    def enter(self, request: refit_pb2.StageRequest) -> None:
        """Put it into a request."""
        ...


@dataclass(frozen=True, slots=True)
class File:
    """A transfer file of `size` bytes in the shared memory of the worker's host."""

    path: Path
    size: int

    def enter(self, request: refit_pb2.StageRequest) -> None:
        """See `Source`."""
        request.shm.CopyFrom(refit_pb2.ShmTransport(path=str(self.path), bytes=self.size))


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a process group that meets at host:port under `name`. rank: of the worker's first rank."""

    host: str
    port: int
    name: str
    rank: int
    size: int

    def enter(self, request: refit_pb2.StageRequest) -> None:
        """See `Source`."""
        request.nccl.CopyFrom(
            refit_pb2.NcclTransport(
                master_address=self.host,
                master_port=self.port,
                unique_id=self.name.encode(),
                rank_offset=self.rank,
                world_size=self.size,
            )
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Buckets on a GPU of the worker's host. handles: GPU uuid -> JSON of their handles.

    places: tensor -> (bucket, offset in bytes), where workers cut slices out of these buckets; else they are the manifest's.
    """

    handles: Mapping[str, str]
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def enter(self, request: refit_pb2.StageRequest) -> None:
        """See `Source`."""
        for gpu, fields in self.handles.items():
            request.cuda_ipc.handles[gpu] = fields.encode()
        for name, (bucket, offset) in self.places.items():
            request.cuda_ipc.places.add(name=name, bucket=bucket, offset=offset)


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a worker says of its engine. tensors: table of what it loads; version: what it serves; ranks: of its engine.

    shadow: there was room for one at its last stage. sparse: it takes tensors as what turns its version's bytes into the new
    ones. needs: digest of what its ranks read of each tensor, "" if they must be sent tensors whole.
    """

    tensors: tuple[refit_pb2.TensorSpec, ...]
    transports: tuple[str, ...]
    shadow: bool
    version: WeightVersion
    engine: str
    ranks: int = 1
    sparse: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """gate_seconds: no token was produced for this long. in_flight: samples that were running at the gate."""

    version: WeightVersion
    gate_seconds: float
    in_flight: int
    tensors_loaded: int


class RefitClient:
    """Speaks to one worker. Every call raises OmnifleetError; `deadline_s` in seconds."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = refit_pb2_grpc.RefitStub(channel)  # type: ignore[no-untyped-call]

    @staticmethod
    @asynccontextmanager
    async def open(address: str, secret: str = "") -> AsyncIterator[RefitClient]:
        """Connect to "host:port" with a bearer token of scope trainer."""
        async with open_channel(address, secret) as channel:
            yield RefitClient(channel)

    async def describe(self, *, deadline_s: float = CALL_S) -> EngineView:
        """What the engine loads and what it serves now."""
        with remote_errors():
            reply = await self._stub.Describe(refit_pb2.DescribeRequest(), timeout=deadline_s)
        return EngineView(
            tuple(reply.tensors),
            tuple(reply.transports),
            reply.shadow,
            version_from_wire(reply.version),
            reply.engine,
            reply.ranks or 1,
            reply.sparse,
            reply.needs,
        )

    async def needs(self, *, deadline_s: float = CALL_S) -> tuple[str, list[NeedsBody]]:
        """What each rank of the engine reads of each tensor, and its digest; ("", []) if it needs them whole."""
        with remote_errors():
            reply = await self._stub.Needs(refit_pb2.NeedsRequest(), timeout=deadline_s)
        return reply.digest, needs_from_wire(reply)

    async def stage(
        self,
        manifest: refit_pb2.Manifest,
        source: Source,
        *,
        deadline_s: float,
        in_place: InFlight | None = None,
    ) -> str:
        """Have the worker fetch and verify the buckets; returns the manifest's digest as it sees it.

        The old version serves on. in_place: where there is no room for a shadow, do without one; what becomes of requests
        that run. The worker is fenced meanwhile, and serves the new version in the end. Raises REFIT_REJECTED, NO_ROOM (for
        a shadow), CONFLICT (another step runs), DEADLINE, UNAVAILABLE; in place also FENCED: it serves nothing now.
        """
        request = refit_pb2.StageRequest(manifest=manifest, deadline_ms=int(deadline_s * 1000))
        if in_place is not None:
            request.in_place = in_flight_to_wire(in_place)
        source.enter(request)
        with remote_errors():
            reply = await self._stub.Stage(request, timeout=deadline_s + _GRACE_S)
        return str(reply.manifest_digest)

    async def commit(self, manifest_digest: str, policy: InFlight, *, deadline_s: float) -> Commit:
        """Gate, load, serve. Raises REFIT_REJECTED, DEADLINE (the old version serves on), FENCED (nothing serves)."""
        request = refit_pb2.CommitRequest(
            manifest_digest=manifest_digest,
            in_flight=in_flight_to_wire(policy),
            deadline_ms=int(deadline_s * 1000),
        )
        with remote_errors():
            reply = await self._stub.Commit(request, timeout=deadline_s + _GRACE_S)
        return Commit(
            version_from_wire(reply.version), reply.gate_seconds, reply.in_flight, reply.tensors_loaded
        )

    async def fetch(
        self, version: WeightVersion, *, deadline_s: float
    ) -> AsyncGenerator[refit_pb2.Manifest | bytes, None]:
        """The manifest that made `version`, then the bytes of its tensors in its order, in chunks.

        Raises VERSION_MOVED if the worker serves another one, UNSUPPORTED if it cannot give its tensors, OVERLOADED.
        """
        call = self._stub.Fetch(refit_pb2.FetchRequest(version=version_to_wire(version)), timeout=deadline_s)
        try:
            with remote_errors():
                async for reply in call:
                    yield reply.manifest if reply.WhichOneof("part") == "manifest" else reply.data
        finally:
            call.cancel()

    async def quarantine(self, reason: str, *, deadline_s: float = CALL_S) -> WeightVersion:
        """Have the worker serve nothing until a complete refit; returns the version that it held. Idempotent."""
        with remote_errors():
            reply = await self._stub.Quarantine(
                refit_pb2.QuarantineRequest(reason=reason), timeout=deadline_s
            )
        return version_from_wire(reply.version)

    async def abort(
        self, manifest_digest: str = "", reason: str = "", *, deadline_s: float = CALL_S
    ) -> WeightVersion:
        """Drop what is staged ("" = whatever it is); returns the version that serves. Idempotent."""
        request = refit_pb2.AbortRequest(manifest_digest=manifest_digest, reason=reason)
        with remote_errors():
            reply = await self._stub.Abort(request, timeout=deadline_s)
        return version_from_wire(reply.version)
