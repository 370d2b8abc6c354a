"""The worker's place in the fleet: join, report, obey, leave. Survives restarts of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from omnifleet.client.fleet import FleetClient, Membership, Orders, WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.telemetry.lateness import watch_lateness
from omnifleet.types import WeightVersion, WorkerState
from omnifleet.wire.server import INSTANCE
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.worker.standing import Standing

log = logging.getLogger("omnifleet.rollout.membership")
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CALL_S = 15.0
"""Longer than a busy gateway's loop is ever held up: a heartbeat that waits there still counts when it is read."""
_LEAVE_S = 5.0
_LATE_S = 0.5
_FINAL = (Reason.UNAUTHENTICATED, Reason.FORBIDDEN, Reason.CONTRACT_MISMATCH, Reason.INVALID_REQUEST)
"""Refusals that no later try changes. Anything else is the gateway's passing trouble, and we try again."""


class Member:
    """Keeps one worker in the registry. `dismissed` is set once the registry wants the process to go."""

    def __init__(
        self,
        engine: Engine,
        standing: Standing,
        counters: Counters,
        *,
        find_gateway: Callable[[], Awaitable[str]],
        secret: str,
        address: str,
        pool: str,
    ) -> None:
        """`find_gateway`: its gRPC address of now; asked again after each loss, as a restart may move it."""
        self._engine, self._standing, self._counters = engine, standing, counters
        self._find_gateway, self._secret = find_gateway, secret
        self._address, self._pool = address, pool
        self._lease: Membership | None = None
        self._rate = _Rate()
        self.dismissed = asyncio.Event()
        self.target: WeightVersion | None = None
        """The weights that the registry wants of our pool, as of the last heartbeat."""
        self.why = ""
        """Why the registry dismissed us."""

    async def run(self) -> None:
        """Report for ever; returns once dismissed. A gateway that is away is looked for again, with growing pauses."""
        lateness = asyncio.create_task(watch_lateness(self._note_lateness))
        try:
            await self._keep_reporting()
        finally:
            lateness.cancel()

    async def _keep_reporting(self) -> None:
        pause = _PAUSE_S
        while not self.dismissed.is_set():
            try:
                async with FleetClient.open(await self._find_gateway(), self._secret) as fleet:
                    await self._report(fleet)
                    pause = _PAUSE_S
                    while not self.dismissed.is_set():
                        await self._next_report()
                        await self._report(fleet)
            except OmnifleetError as error:
                if error.reason in _FINAL:
                    raise
                if error.reason is Reason.CONFLICT:
                    self._dismiss(error.message)
                    return
                log.info("gateway not reachable, trying again: %s", error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def leave(self, reason: str) -> None:
        """Tell the registry that we go on purpose. A gateway that is away learns it from our silence."""
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(_LEAVE_S):
                async with FleetClient.open(await self._find_gateway(), self._secret) as fleet:
                    await fleet.leave(self._lease.lease_id, reason, deadline_s=_LEAVE_S)
        except (OmnifleetError, TimeoutError) as error:
            log.info("could not take leave of the gateway: %s", error)

    async def _report(self, fleet: FleetClient) -> None:
        self._standing.changed.clear()
        if self._lease is None:
            # Joining is always JOINING: the first heartbeat then says that the engine is up.
            joining = replace(self.view(), state=WorkerState.JOINING)
            self._lease = await fleet.join(joining, deadline_s=_CALL_S)
        orders = await fleet.heartbeat(self._lease.lease_id, self.view(), deadline_s=_CALL_S)
        if orders.rejoin:
            self._lease = await fleet.join(self.view(), deadline_s=_CALL_S)
            orders = await fleet.heartbeat(self._lease.lease_id, self.view(), deadline_s=_CALL_S)
        self._obey(orders)

    def _obey(self, orders: Orders) -> None:
        self.target = orders.target_version
        if orders.wanted in (WorkerState.RETIRED, WorkerState.DEAD):
            self._dismiss(
                f"the registry holds this worker for {orders.wanted}: {orders.note or 'no reason given'}"
            )
        goes = orders.wanted in (WorkerState.DRAINING, WorkerState.RETIRED, WorkerState.DEAD)
        if goes and not self._standing.draining:
            log.info("draining: %s", orders.note or "asked to")
            self._standing.start_drain()

    def _dismiss(self, why: str) -> None:
        log.warning("stopping: %s", why)
        self.why = why
        self.dismissed.set()

    async def _next_report(self) -> None:
        """Sleep one heartbeat, or until something changed that the gateway should know at once."""
        assert self._lease is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease.heartbeat_s):
                await self._standing.changed.wait()

    def _note_lateness(self, late_s: float) -> None:
        """The loop serves generation, refits and heartbeats: who looks for a silent worker finds here that it was busy."""
        self._counters.add("loop_late_seconds", late_s)
        if late_s > _LATE_S:
            log.warning("this worker's event loop was held up for %.1f s", late_s)

    def view(self) -> WorkerView:
        """This worker as it is now."""
        facts, stats, standing = self._engine.facts, self._engine.stats(), self._standing
        return WorkerView(
            id=standing.worker,
            instance=INSTANCE,
            pool=self._pool,
            host=socket.gethostname(),
            grpc_address=self._address,
            model=facts.model,
            engine=facts.info,
            state=standing.state,
            version=standing.version,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            tokens_per_s=self._rate.of(self._counters.count("tokens_generated")),
            note=standing.fence or standing.note,
            counters=self._counters.snapshot(),
            max_running=facts.max_num_seqs,
            pid=os.getpid(),
        )


class _Rate:
    """Growth of a counter per second between two looks, at least half a second apart."""

    def __init__(self) -> None:
        self._then, self._count, self._rate = time.monotonic(), 0.0, 0.0

    def of(self, count: float) -> float:
        """Rate as of the last two looks."""
        now = time.monotonic()
        if now - self._then >= 0.5:
            self._rate = (count - self._count) / (now - self._then)
            self._then, self._count = now, count
        return self._rate
