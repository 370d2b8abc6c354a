"""A registry of workers and a sender that reaches them by a group, for tests of refits over groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from omnifleet.auth import OPEN
from omnifleet.wire import fleet_pb2_grpc
from omnifleet.wire.server import serving
from omnifleet_trainer.refit.broadcast import BroadcastSender
from tests.refit_registry import Registry
from tests.refit_world import CPU, Receiving


@asynccontextmanager
async def broadcasting(workers: Sequence[Receiving], **settings: Any) -> AsyncIterator[BroadcastSender]:
    """An open sender. settings: of `BroadcastSender.connect`, besides what every test has."""
    registry = Registry()
    registry.workers = {worker.id: worker for worker in workers}

    def register(server: object) -> None:
        fleet_pb2_grpc.add_FleetServicer_to_server(registry, server)

    shared = {"run": "r", "lineage": "l", "device": CPU, "host": "127.0.0.1", "timeout_s": 20.0}
    async with serving("127.0.0.1:0", register, tokens=OPEN, knob="test", grace_s=0) as address:
        async with BroadcastSender.connect(address, "", **(shared | settings)) as sender:
            yield sender
