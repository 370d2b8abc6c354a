"""Connections to workers: one channel a worker, opened at first use, closed when the worker is gone."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.wire import rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import TRAILER, from_rpc

_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class Links:
    """worker id -> stub. `secret` is the service scope's. older: workers that were found to lack GenerateAtOnce.

    metadata: goes with each call. An interceptor would do it for all of them, and would cost a call of one short reply a tenth.
    """

    def __init__(self, secret: str) -> None:
        self.metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, rollout_pb2_grpc.RolloutStub] = {}
        self.older: set[str] = set()

    def stub(self, worker: WorkerView) -> rollout_pb2_grpc.RolloutStub:
        """The Rollout service of a worker."""
        stub = self._stubs.get(worker.id)
        if stub is None:
            channel = self._channels[worker.id] = open_channel(worker.grpc_address)
            stub = self._stubs[worker.id] = rollout_pb2_grpc.RolloutStub(channel)  # type: ignore[no-untyped-call]
        return stub

    async def keep(self, living: Iterable[str]) -> None:
        """Close the channels of all other workers."""
        for id in self._channels.keys() - set(living):
            del self._stubs[id]
            self.older.discard(id)
            await self._channels.pop(id).close(None)

    async def close(self) -> None:
        """Close all."""
        await self.keep(())


def meaning(error: grpc.RpcError, worker: str) -> OmnifleetError:
    """What a failed call to a worker means: the worker's own words, or WORKER_LOST if the call broke under it."""
    if not _spoke(error) and error.code() in _BROKEN:
        details = error.details() or "the call broke"
        return retryable(Reason.WORKER_LOST, f"worker {worker} is lost: {details}")
    return from_rpc(error)


def lacks_method(error: grpc.RpcError) -> bool:
    """True if the worker is of a release that does not have the method."""
    return error.code() is grpc.StatusCode.UNIMPLEMENTED and not _spoke(error)


def _spoke(error: grpc.RpcError) -> bool:
    return any(key == TRAILER for key, _ in getattr(error, "trailing_metadata", tuple)() or ())
