"""The fleet registry alone, as a gateway would serve it, for tests that start workers as processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.service import load_tokens, write_record
from omnifleet.wire import fleet_pb2_grpc
from omnifleet.wire.server import serving
from omnifleet_rollout.fleet.registry import Registry
from omnifleet_rollout.fleet.service import Fleet, FleetServicer
from omnifleet_rollout.fleet.store import FleetStore


@asynccontextmanager
async def fleet_at(
    run_dir: Path, store: FleetStore, *, heartbeat_s: float, suspect_after_s: float, dead_after_s: float
) -> AsyncIterator[FleetClient]:
    """Serve what `store` holds; the record in `run_dir` leads workers here."""
    registry = Registry(
        time.monotonic,
        heartbeat_s=heartbeat_s,
        suspect_after_s=suspect_after_s,
        dead_after_s=dead_after_s,
    )
    store.load(registry)
    fleet = Fleet(registry, store, look_every_s=0.1)
    tokens = load_tokens(run_dir)

    def register(server: grpc.aio.Server) -> None:
        fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(fleet), server)

    looking = asyncio.create_task(fleet.look())
    async with serving("127.0.0.1:0", register, tokens=tokens, knob="listen", grace_s=0.1) as address:
        write_record(run_dir, "gateway", grpc=address)
        async with FleetClient.open(address, tokens.secret(Scope.OPERATOR)) as client:
            yield client
        fleet.close()
    looking.cancel()


async def until(
    client: FleetClient, wanted: Callable[[WorkerView], bool], deadline_s: float = 60.0
) -> WorkerView:
    """The first worker that is as wanted, gone ones included."""
    async with asyncio.timeout(deadline_s):
        async for view in client.watch(include_gone=True):
            for worker in view.workers:
                if wanted(worker):
                    return worker
    raise AssertionError("the watch ended")
