"""Client of the fleet registry: workers join, operators act, the trainer and launchers watch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import grpc.aio

from omnifleet.types import WeightVersion, WorkerState
from omnifleet.wire import fleet_pb2, fleet_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import (
    counters_from_wire,
    counters_to_wire,
    state_from_wire,
    state_to_wire,
    version_from_wire,
    version_to_wire,
)
from omnifleet.wire.errors import remote_errors

CALL_S = 10.0
"""Deadline of a unary call, seconds, where the caller names none."""


class Verb(StrEnum):
    """What an operator asks of one worker."""

    DRAIN = "drain"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    PIN = "pin"
    UNPIN = "unpin"
    RETIRE = "retire"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the registry sees it; also what a worker reports about itself.

    `id` belongs to one process and is never used again: workers join as NAME-INSTANCE (`worker_id`).
    In a report, `state` is the worker's own knowledge: JOINING (engine not up), CATCHING_UP or READY (engine up,
    weights whole; the registry decides which), STALE (weights not whole: fenced), DRAINING (it was told to stop).
    kv_usage in 0..1.
    """

    id: str
    instance: str = ""
    pool: str = "default"
    host: str = ""
    grpc_address: str = ""
    model: str = ""
    engine: str = ""
    state: WorkerState = WorkerState.JOINING
    version: WeightVersion | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0
    heartbeat_unix_ms: int = 0
    note: str = ""
    pinned: bool = False
    counters: Mapping[str, float] = field(default_factory=dict)
    max_running: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot. `desired`: workers that the operator or autoscaler wants. `revision` grows with every change."""

    workers: list[WorkerView]
    desired: int
    target_version: WeightVersion | None
    revision: int


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker gets for joining: heartbeat every `heartbeat_s` seconds under `lease_id`."""

    lease_id: str
    heartbeat_s: float
    target_version: WeightVersion | None


@dataclass(frozen=True, slots=True)
class Orders:
    """Answer to a heartbeat.

    wanted: the worker's state in the registry. DRAINING: finish, then leave and exit. RETIRED or DEAD: exit now.
    target_version: weights to reach before serving. rejoin: the registry does not know this lease; join again.
    note: why the worker is in this state.
    """

    wanted: WorkerState | None
    target_version: WeightVersion | None
    rejoin: bool
    note: str = ""


def worker_id(name: str, instance: str) -> str:
    """Id of one worker process: its name and the start of its instance. Operators may say just the name."""
    return f"{name}-{instance[:6]}"


class FleetClient:
    """Speaks to the Fleet service of a gateway. Every call raises OmnifleetError; `deadline_s` in seconds."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = fleet_pb2_grpc.FleetStub(channel)  # type: ignore[no-untyped-call]

    @staticmethod
    @asynccontextmanager
    async def open(address: str, secret: str = "") -> AsyncIterator[FleetClient]:
        """Connect to "host:port" with a bearer token."""
        async with open_channel(address, secret) as channel:
            yield FleetClient(channel)

    async def list(
        self, pool: str = "", *, include_gone: bool = False, deadline_s: float = CALL_S
    ) -> FleetView:
        """Workers of one pool, or of all ("")."""
        request = fleet_pb2.ListRequest(pool=pool, include_gone=include_gone)
        with remote_errors():
            return view_from_wire(await self._stub.List(request, timeout=deadline_s))

    async def watch(self, pool: str = "", *, include_gone: bool = False) -> AsyncGenerator[FleetView, None]:
        """A snapshot now, after every change, and at least every 10 s. Ends when the gateway stops."""
        call = self._stub.Watch(fleet_pb2.ListRequest(pool=pool, include_gone=include_gone))
        try:
            with remote_errors():
                async for reply in call:
                    yield view_from_wire(reply)
        finally:
            call.cancel()

    async def act(
        self,
        verb: Verb,
        worker: str,
        reason: str = "",
        *,
        drain_s: float = 0.0,
        deadline_s: float = CALL_S,
    ) -> WorkerView:
        """Do `verb` to a worker (its id, or a name that one living worker has).

        drain_s: seconds after which a draining worker is retired; 0 = when it is done.
        """
        request = fleet_pb2.ActRequest(
            verb=verb.name, worker=worker, reason=reason, deadline_ms=int(drain_s * 1000)
        )
        with remote_errors():
            reply = await self._stub.Act(request, timeout=deadline_s)
        return worker_from_wire(reply.worker)

    async def scale(
        self, desired: int, *, pool: str = "", reason: str = "", deadline_s: float = CALL_S
    ) -> tuple[int, tuple[str, ...]]:
        """Ask for `desired` workers. Returns (desired, ids that now drain); launchers start what is missing."""
        request = fleet_pb2.ScaleRequest(pool=pool, desired=desired, reason=reason)
        with remote_errors():
            reply = await self._stub.Scale(request, timeout=deadline_s)
        return reply.desired, tuple(reply.draining)

    async def assign(
        self, pool: str, run: str, *, quota: int = 0, priority: int = 0, deadline_s: float = CALL_S
    ) -> None:
        """Give a pool to one run ("" = to all). quota: samples at once, 0 = the gateway's queue_per_run."""
        request = fleet_pb2.AssignRequest(pool=pool, run=run, quota=quota, priority=priority)
        with remote_errors():
            await self._stub.Assign(request, timeout=deadline_s)

    async def announce_version(
        self, version: WeightVersion, *, pool: str = "", max_lag: int = 1, deadline_s: float = CALL_S
    ) -> int:
        """State the weights that a pool must have: newcomers exactly these, serving workers within `max_lag` numbers.

        Returns the registry's revision. Raises CONFLICT for a lower number in the same lineage.
        """
        request = fleet_pb2.AnnounceVersionRequest(
            pool=pool, version=version_to_wire(version), max_lag=max_lag
        )
        with remote_errors():
            reply = await self._stub.AnnounceVersion(request, timeout=deadline_s)
        return int(reply.revision)

    async def join(self, worker: WorkerView, *, deadline_s: float = CALL_S) -> Membership:
        """Register a worker process. Raises CONFLICT if another process had this id, or if it is gone."""
        with remote_errors():
            reply = await self._stub.Join(
                fleet_pb2.JoinRequest(worker=worker_to_wire(worker)), timeout=deadline_s
            )
        target = version_from_wire(reply.target_version) if reply.HasField("target_version") else None
        return Membership(reply.lease_id, reply.heartbeat_ms / 1000, target)

    async def heartbeat(self, lease_id: str, worker: WorkerView, *, deadline_s: float = CALL_S) -> Orders:
        """Report, and learn what the registry wants."""
        request = fleet_pb2.HeartbeatRequest(lease_id=lease_id, worker=worker_to_wire(worker))
        with remote_errors():
            reply = await self._stub.Heartbeat(request, timeout=deadline_s)
        target = version_from_wire(reply.target_version) if reply.HasField("target_version") else None
        return Orders(state_from_wire(reply.wanted), target, reply.rejoin, reply.note)

    async def leave(self, lease_id: str, reason: str = "", *, deadline_s: float = CALL_S) -> None:
        """Go on purpose; harmless when already gone."""
        with remote_errors():
            await self._stub.Leave(
                fleet_pb2.LeaveRequest(lease_id=lease_id, reason=reason), timeout=deadline_s
            )


def worker_to_wire(worker: WorkerView) -> fleet_pb2.WorkerInfo:
    """View -> message."""
    return fleet_pb2.WorkerInfo(
        id=worker.id,
        instance=worker.instance,
        pool=worker.pool,
        host=worker.host,
        grpc_address=worker.grpc_address,
        model=worker.model,
        engine=worker.engine,
        state=state_to_wire(worker.state),
        version=version_to_wire(worker.version),
        running=worker.running,
        waiting=worker.waiting,
        kv_usage=worker.kv_usage,
        tokens_per_s=worker.tokens_per_s,
        heartbeat_unix_ms=worker.heartbeat_unix_ms,
        note=worker.note,
        pinned=worker.pinned,
        counters=counters_to_wire(worker.counters),
        max_running=worker.max_running,
        pid=worker.pid,
    )


def worker_from_wire(m: fleet_pb2.WorkerInfo) -> WorkerView:
    """Message -> view; an unspecified state is JOINING."""
    return WorkerView(
        id=m.id,
        instance=m.instance,
        pool=m.pool or "default",
        host=m.host,
        grpc_address=m.grpc_address,
        model=m.model,
        engine=m.engine,
        state=state_from_wire(m.state) or WorkerState.JOINING,
        version=version_from_wire(m.version) if m.HasField("version") else None,
        running=m.running,
        waiting=m.waiting,
        kv_usage=m.kv_usage,
        tokens_per_s=m.tokens_per_s,
        heartbeat_unix_ms=m.heartbeat_unix_ms,
        note=m.note,
        pinned=m.pinned,
        counters=counters_from_wire(m.counters),
        max_running=m.max_running,
        pid=m.pid,
    )


def view_from_wire(m: fleet_pb2.ListReply) -> FleetView:
    """Message -> snapshot."""
    target = version_from_wire(m.target_version) if m.HasField("target_version") else None
    return FleetView([worker_from_wire(w) for w in m.workers], m.desired, target, m.revision)


def view_to_wire(view: FleetView) -> fleet_pb2.ListReply:
    """Snapshot -> message."""
    return fleet_pb2.ListReply(
        workers=[worker_to_wire(w) for w in view.workers],
        desired=view.desired,
        target_version=version_to_wire(view.target_version),
        revision=view.revision,
    )
