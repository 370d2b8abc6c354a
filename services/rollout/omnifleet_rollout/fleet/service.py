"""The registry over gRPC. Every change is on disk before its caller hears of it, and then goes to the watchers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from omnifleet.client.fleet import FleetView, Verb, WorkerView, view_to_wire, worker_from_wire, worker_to_wire
from omnifleet.errors import OmnifleetError, invalid
from omnifleet.telemetry.lateness import watch_lateness
from omnifleet.types import WeightVersion
from omnifleet.wire import common_pb2, fleet_pb2, fleet_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import state_to_wire, version_from_wire, version_to_wire
from omnifleet.wire.server import handshake
from omnifleet_rollout.fleet.registry import Registry
from omnifleet_rollout.fleet.store import FleetStore

WATCH_S = 10.0
"""Longest silence of a watch, seconds."""

log = logging.getLogger("omnifleet.fleet")
_PROBE_S = 3.0
_LATE_S = 1.0


def _tell_lateness(late_s: float) -> None:
    if late_s > _LATE_S:
        log.warning("this gateway's event loop was held up for %.1f s", late_s)


async def wait_for(moved: asyncio.Event, timeout_s: float) -> bool:
    """Wait for a change, at most `timeout_s` seconds. False if none came."""
    try:
        await asyncio.wait_for(moved.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


async def answers(address: str, timeout_s: float = _PROBE_S) -> bool:
    """Whether a process at "host:port" answers at the level of the transport.

    gRPC answers there from threads of its own: a worker whose event loop is busy or starved does, and a process that is
    gone or stopped does not.
    """
    try:
        async with asyncio.timeout(timeout_s), open_channel(address) as channel:
            # A refused connection tells at once; gRPC would try it again until the time is over.
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await channel.channel_ready()
    except OSError:  # TimeoutError is one
        return False
    return True


class Fleet:
    """Registry, store and watchers of one gateway process."""

    def __init__(self, registry: Registry, store: FleetStore, *, look_every_s: float) -> None:
        self.registry = registry
        self._store = store
        self._look_every_s = look_every_s
        self._published = -1
        self._moved = asyncio.Event()
        self.closed = False

    def publish(self) -> None:
        """Save and wake the watchers if the registry changed."""
        if self.registry.revision != self._published:
            self._store.save(self.registry)
            self._published = self.registry.revision
            self._wake()

    @property
    def moved(self) -> asyncio.Event:
        """Set at the next change. Take it before looking, so that no change falls between the look and the wait."""
        return self._moved

    async def look(self) -> None:
        """Tick for ever: silence becomes SUSPECT; DEAD takes a process that does not answer either."""
        asking: dict[str, asyncio.Task[None]] = {}
        lateness = asyncio.create_task(watch_lateness(_tell_lateness))
        try:
            while True:
                await asyncio.sleep(self._look_every_s)
                for view in self.registry.tick():
                    if view.id not in asking or asking[view.id].done():
                        asking[view.id] = asyncio.create_task(self._ask(view))
                self._publish_or_log()
        finally:
            tasks = [lateness, *asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, view: WorkerView) -> None:
        if await answers(view.grpc_address):
            log.warning("worker %s sends no heartbeats, but its process answers: it may be slow", view.id)
            self.registry.spare(view.id)
        else:
            self.registry.bury(view.id)
            after = self.registry.worker(view.id)
            if after is not None and after.state.gone:
                log.warning("worker %s is %s: %s", view.id, after.state, after.note)
        self._publish_or_log()

    def _publish_or_log(self) -> None:
        try:
            self.publish()
        except OmnifleetError as error:
            log.error("%s", error)

    def lost(self, worker: str, note: str) -> None:
        """A call to the worker broke."""
        self.registry.lost(worker, note)
        self.publish()

    def view(self, pool: str = "", *, include_gone: bool = False) -> FleetView:
        """A snapshot with the times of the last heartbeats in Unix milliseconds."""
        now = time.time()
        view = self.registry.view(pool, include_gone=include_gone)
        heard = [int(1000 * (now - self.registry.silence(w.id))) for w in view.workers]
        workers = [replace(w, heartbeat_unix_ms=ms) for w, ms in zip(view.workers, heard, strict=True)]
        return replace(view, workers=workers)

    def close(self) -> None:
        """End all watches."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """The Fleet service of the contract."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = fleet.registry

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """See the contract."""
        return handshake(request, "fleet")

    async def Join(self, request: fleet_pb2.JoinRequest, context: Any) -> fleet_pb2.JoinReply:
        """See the contract."""
        membership = self._registry.join(worker_from_wire(request.worker))
        self._fleet.publish()
        return fleet_pb2.JoinReply(
            lease_id=membership.lease_id,
            heartbeat_ms=int(membership.heartbeat_s * 1000),
            target_version=version_to_wire(membership.target_version),
        )

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Any) -> fleet_pb2.HeartbeatReply:
        """See the contract."""
        orders = self._registry.heartbeat(request.lease_id, worker_from_wire(request.worker))
        self._fleet.publish()
        return fleet_pb2.HeartbeatReply(
            wanted=state_to_wire(orders.wanted) if orders.wanted else fleet_pb2.WORKER_STATE_UNSPECIFIED,
            target_version=version_to_wire(orders.target_version),
            rejoin=orders.rejoin,
            note=orders.note,
        )

    async def Leave(self, request: fleet_pb2.LeaveRequest, context: Any) -> fleet_pb2.LeaveReply:
        """See the contract."""
        self._registry.leave(request.lease_id, request.reason)
        self._fleet.publish()
        return fleet_pb2.LeaveReply()

    async def List(self, request: fleet_pb2.ListRequest, context: Any) -> fleet_pb2.ListReply:
        """See the contract."""
        return view_to_wire(self._fleet.view(request.pool, include_gone=request.include_gone))

    async def Watch(self, request: fleet_pb2.ListRequest, context: Any) -> AsyncIterator[fleet_pb2.ListReply]:
        """See the contract."""
        while not self._fleet.closed:
            moved = self._fleet.moved
            yield view_to_wire(self._fleet.view(request.pool, include_gone=request.include_gone))
            await wait_for(moved, WATCH_S)

    async def Act(self, request: fleet_pb2.ActRequest, context: Any) -> fleet_pb2.ActReply:
        """See the contract."""
        name = fleet_pb2.Verb.Name(request.verb)
        if name not in Verb.__members__:
            raise invalid(f"verb {name}: allowed are {', '.join(Verb)}")
        view = self._registry.act(Verb[name], request.worker, request.reason, request.deadline_ms / 1000)
        self._fleet.publish()
        return fleet_pb2.ActReply(worker=worker_to_wire(view))

    async def Scale(self, request: fleet_pb2.ScaleRequest, context: Any) -> fleet_pb2.ScaleReply:
        """See the contract."""
        desired, draining = self._registry.scale(request.pool, request.desired, request.reason)
        self._fleet.publish()
        return fleet_pb2.ScaleReply(desired=desired, draining=draining)

    async def Assign(self, request: fleet_pb2.AssignRequest, context: Any) -> fleet_pb2.AssignReply:
        """See the contract."""
        self._registry.assign(request.pool, request.run, request.quota, request.priority)
        self._fleet.publish()
        return fleet_pb2.AssignReply()

    async def AnnounceVersion(
        self, request: fleet_pb2.AnnounceVersionRequest, context: Any
    ) -> fleet_pb2.AnnounceVersionReply:
        """See the contract."""
        version: WeightVersion = version_from_wire(request.version)
        if not version.run or not version.lineage:
            raise invalid(f"version {version}: run and lineage must be named")
        revision = self._registry.announce(request.pool, version, request.max_lag)
        self._fleet.publish()
        return fleet_pb2.AnnounceVersionReply(revision=revision)
