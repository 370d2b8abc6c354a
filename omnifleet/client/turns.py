"""Client of a worker's Turns service: have its engine give the device up, and take it back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from omnifleet.types import WeightVersion
from omnifleet.wire import turns_pb2, turns_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import version_from_wire
from omnifleet.wire.errors import remote_errors

_GRACE_S = 2.0
"""What a call is given beyond the deadline that the worker is told, so that its own error arrives."""


class TurnsClient:
    """Speaks to one worker. Every call raises OmnifleetError; `deadline_s` in seconds."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = turns_pb2_grpc.TurnsStub(channel)  # type: ignore[no-untyped-call]

    @staticmethod
    @asynccontextmanager
    async def open(address: str, secret: str = "") -> AsyncIterator[TurnsClient]:
        """Connect to "host:port" with a bearer token of scope trainer."""
        async with open_channel(address, secret) as channel:
            yield TurnsClient(channel)

    async def sleep(self, level: int, *, deadline_s: float) -> int:
        """Returns once the device is free (see turns.proto for levels): how many samples were running. Idempotent.

        Raises CONFLICT (retryable: a refit step runs), DEADLINE, ENGINE_ERROR, UNSUPPORTED.
        """
        request = turns_pb2.SleepRequest(level=level, deadline_ms=int(deadline_s * 1000))
        with remote_errors():
            reply = await self._stub.Sleep(request, timeout=deadline_s + _GRACE_S)
        return int(reply.in_flight)

    async def wake(self, *, weights_only: bool = False, deadline_s: float) -> WeightVersion:
        """Returns once the engine has its memory, or that of its weights, again: the version it holds. Idempotent.

        Raises as `sleep` does.
        """
        request = turns_pb2.WakeRequest(weights_only=weights_only, deadline_ms=int(deadline_s * 1000))
        with remote_errors():
            reply = await self._stub.Wake(request, timeout=deadline_s + _GRACE_S)
        return version_from_wire(reply.version)
