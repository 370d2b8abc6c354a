"""The Turns service of a worker: messages in, messages out, nothing decided here."""

from __future__ import annotations

from typing import Any

from omnifleet.wire import turns_pb2, turns_pb2_grpc
from omnifleet.wire.codec import version_to_wire
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.worker.gate import Gate


class TurnsServicer(turns_pb2_grpc.TurnsServicer):
    """Sleep and wake, one at a time with the steps of refits."""

    def __init__(self, receiver: Receiver, gate: Gate) -> None:
        self._receiver, self._gate = receiver, gate

    async def Sleep(self, request: turns_pb2.SleepRequest, context: Any) -> turns_pb2.SleepReply:
        """See the contract."""
        running = await self._receiver.sleep(request.level, request.deadline_ms / 1000)
        return turns_pb2.SleepReply(
            version=version_to_wire(self._gate.standing.version),
            in_flight=running,
            level=self._receiver.rest.level,
        )

    async def Wake(self, request: turns_pb2.WakeRequest, context: Any) -> turns_pb2.WakeReply:
        """See the contract."""
        await self._receiver.wake(weights_only=request.weights_only, deadline_s=request.deadline_ms / 1000)
        return turns_pb2.WakeReply(version=version_to_wire(self._gate.standing.version))
