"""A fleet registry for tests of refits: shows workers as they are, remembers what was announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from omnifleet.auth import OPEN
from omnifleet.client.fleet import FleetView, WorkerView, view_to_wire
from omnifleet.types import WeightVersion, WorkerState
from omnifleet.wire import fleet_pb2, fleet_pb2_grpc
from omnifleet.wire.codec import version_from_wire
from omnifleet.wire.server import serving


class Registry(fleet_pb2_grpc.FleetServicer):
    """Shows the workers as they are (id, address, version, fenced); `target` is what was announced."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.target: WeightVersion | None = None
        self.announced: list[int] = []
        self.acts: list[tuple[str, str]] = []
        self._moved = asyncio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its address while it is served."""

        def register(server: object) -> None:
            fleet_pb2_grpc.add_FleetServicer_to_server(self, server)

        async with serving("127.0.0.1:0", register, tokens=OPEN, knob="test", grace_s=0) as address:
            yield address

    def moved(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _view(self) -> fleet_pb2.ListReply:
        workers = [
            WorkerView(
                w.id,
                grpc_address=w.address,
                state=WorkerState.STALE if w.fenced else WorkerState.CATCHING_UP,
                version=w.version,
            )
            for w in self.workers.values()
        ]
        return view_to_wire(FleetView(workers, len(workers), self.target, 0))

    async def List(self, request: Any, context: Any) -> fleet_pb2.ListReply:
        return self._view()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[fleet_pb2.ListReply]:
        while True:
            moved = self._moved
            yield self._view()
            await moved.wait()

    async def Act(self, request: Any, context: Any) -> fleet_pb2.ActReply:
        self.acts.append((fleet_pb2.Verb.Name(request.verb), request.worker))
        return fleet_pb2.ActReply()

    async def AnnounceVersion(self, request: Any, context: Any) -> fleet_pb2.AnnounceVersionReply:
        self.target = version_from_wire(request.version)
        self.announced.append(self.target.number)
        self.moved()
        return fleet_pb2.AnnounceVersionReply(revision=1)
