"""One worker process from start to end: engine, services, membership, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio

from omnifleet.auth import Scope, Tokens
from omnifleet.client.fleet import worker_id
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.http import http_serving, make_app
from omnifleet.service import freeze_heap, peer, until_stopped, write_record
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WorkerState
from omnifleet.wire import refit_pb2_grpc, rollout_pb2_grpc, turns_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.server import INSTANCE, serving
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.worker.catchup import CatchUp
from omnifleet_rollout.worker.gate import Ending, Gate
from omnifleet_rollout.worker.membership import Member
from omnifleet_rollout.worker.server import RefitServicer, RolloutServicer
from omnifleet_rollout.worker.standing import Standing
from omnifleet_rollout.worker.turns import TurnsServicer

log = logging.getLogger("omnifleet.rollout.worker")
SIGNAL_DRAIN_S = 5.0
"""How long running samples may finish after SIGTERM; a drain by the registry has `rollout.drain_timeout_s`."""
_LOOK_S = 0.25
_WAITING_PER_RUNNING = 2


class Worker:
    """Everything around one started engine. `serve` runs until the process should end."""

    def __init__(self, engine: Engine, name: str, config: RolloutConfig, tokens: Tokens) -> None:
        self.engine, self.config, self.tokens = engine, config, tokens
        self.name = name
        self.counters = Counters("rollout")
        self.standing = Standing(worker_id(name, INSTANCE), base_version(engine.facts.tensors))
        limit = engine.facts.max_num_seqs * (1 + _WAITING_PER_RUNNING)
        self.gate = Gate(self.standing, limit)
        self.receiver = Receiver(engine, self.gate, self.counters)
        self._gauges()

    def register(self, server: grpc.aio.Server) -> None:
        """Put the worker's services on a server."""
        rollout = RolloutServicer(self.engine, self.gate, self.counters)
        refit = RefitServicer(self.engine, self.receiver, self.gate)
        rollout_pb2_grpc.add_RolloutServicer_to_server(rollout, server)  # type: ignore[no-untyped-call]
        refit_pb2_grpc.add_RefitServicer_to_server(refit, server)  # type: ignore[no-untyped-call]
        turns = TurnsServicer(self.receiver, self.gate)
        turns_pb2_grpc.add_TurnsServicer_to_server(turns, server)  # type: ignore[no-untyped-call]

    async def serve(self, run_dir: Path, *, listen: str, http_listen: str, gateway: str) -> str:
        """Serve and stay a member of the fleet until stopped, drained or dismissed; returns why it ended.

        Raises OmnifleetError: PORT_TAKEN, WORKER_LOST if the engine died.
        """
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(
                serving(listen, self.register, tokens=self.tokens, knob="rollout.listen", grace_s=1.0)
            )
            app = make_app("omnifleet rollout worker", self.counters, self._ready)
            http = await stack.enter_async_context(http_serving(app, http_listen, knob="--http-listen"))
            write_record(run_dir, self.name, grpc=address, http=http)
            log.info("%s serves %s on %s", self.standing.worker, self.engine.facts.info, address)
            member = Member(
                self.engine,
                self.standing,
                self.counters,
                find_gateway=lambda: peer(run_dir, "gateway", given=gateway),
                secret=self.tokens.secret(Scope.SERVICE),
                address=address,
                pool=self.config.pool,
            )
            catching_up = CatchUp(
                self.engine,
                self.receiver,
                self.standing,
                self.counters,
                find_gateway=lambda: peer(run_dir, "gateway", given=gateway),
                target=lambda: member.target,
                secret=self.tokens.secret(Scope.SERVICE),
                pool=self.config.pool,
                patience_s=self.config.peers_after_s,
                policy=self.config.kv_after_refit,
            )
            return await self._until_done(member, catching_up)

    async def _until_done(self, member: Member, catching_up: CatchUp) -> str:
        following = asyncio.create_task(catching_up.run(), name="catch-up")
        reporting = asyncio.create_task(member.run(), name="membership")
        stopping = asyncio.create_task(until_stopped(), name="signals")
        dying = asyncio.create_task(self._engine_death(), name="engine")
        draining = asyncio.create_task(self._drained(), name="drain")
        tasks = {reporting, stopping, dying, draining, following}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                await member.leave("the engine died")
                raise OmnifleetError(Reason.WORKER_LOST, f"the engine of {self.name} died", retryable=True)
            if stopping.done():
                await self._finish_running(SIGNAL_DRAIN_S)
            why = member.why or ("drained" if draining.done() else "stopped by a signal")
            await member.leave("drained" if draining.done() else "stopped")
            for task in (reporting, following):
                if task.done():
                    task.result()
            return why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drained(self) -> None:
        """Return when a drain that the registry ordered is over."""
        await self.standing.leaving.wait()
        await self._finish_running(self.config.drain_timeout_s)

    async def _finish_running(self, timeout_s: float) -> None:
        """Take nothing new; let samples finish, then end what is left in a way that resumes elsewhere."""
        self.standing.start_drain()
        if not await self.gate.until_gone(timeout_s):
            log.warning("ending %d samples that did not finish in %.0f s", len(self.gate.inside), timeout_s)
            await self.engine.abort(self.gate.end(Ending.LEAVING))
            await self.gate.until_gone(1.0)

    async def _engine_death(self) -> None:
        while self.engine.alive():  # noqa: ASYNC110 - engines tell of their death by a flag only
            await asyncio.sleep(_LOOK_S)

    def _ready(self) -> bool:
        return self.standing.state is WorkerState.CATCHING_UP and self.engine.alive()

    def _gauges(self) -> None:
        stats = self.engine.stats
        self.counters.gauge("requests_running", lambda: stats().running)
        self.counters.gauge("requests_waiting", lambda: stats().waiting)
        self.counters.gauge("kv_usage", lambda: stats().kv_usage)
        self.counters.gauge("busy_seconds", lambda: self.gate.busy_s)
        self.counters.gauge("weight_version", lambda: self.standing.version.number)
        for name in stats().counters:
            self.counters.gauge(name, _reader(self.engine, name))


def _reader(engine: Engine, name: str) -> Callable[[], float]:
    return lambda: engine.stats().counters.get(name, 0.0)


async def run_worker(
    engine: Engine,
    name: str,
    config: RolloutConfig,
    tokens: Tokens,
    run_dir: Path,
    *,
    listen: str,
    http_listen: str,
    gateway: str,
) -> None:
    """Start the engine, serve, and shut the engine down whatever happens."""
    try:
        # No gRPC before this returns: the engine's process may be forked from ours, and must not hold our sockets.
        await engine.start()
        freeze_heap()
        worker = Worker(engine, name, config, tokens)
        why = await worker.serve(run_dir, listen=listen, http_listen=http_listen, gateway=gateway)
    finally:
        await engine.shutdown()
    log.info("%s ends: %s", name, why)
