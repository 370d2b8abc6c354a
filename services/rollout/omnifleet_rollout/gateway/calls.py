"""Open calls to workers. A call ends with its worker: by itself, or when the registry gives the worker up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import Reason, retryable
from omnifleet.wire import rollout_pb2
from omnifleet.wire.batches import unpacked
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.gateway.links import Links, lacks_method, meaning

SHORT_TOKENS = 16
"""Longest reply that is asked for in one message. An engine hands as many over at once (`rollout.engine.bulk_tokens`), so nothing
of such a reply could come ahead: if its worker is lost, all of it is made again either way."""


@dataclass(slots=True)
class _Call:
    """lost: the registry gave the worker up."""

    call: Any
    lost: str = ""


class Calls:
    """Every error of a call is typed: the worker's own words, or WORKER_LOST if the call broke under it."""

    def __init__(self, fleet: Fleet, links: Links) -> None:
        self._fleet, self._links = fleet, links
        self._open: dict[str, list[_Call]] = {}

    @property
    def workers(self) -> set[str]:
        """Who is being called."""
        return set(self._open)

    async def generate(
        self, worker: str, request: rollout_pb2.GenerateRequest, left_s: float
    ) -> AsyncGenerator[rollout_pb2.GenerateEvent, None]:
        """Events of one sample: as they come, or those of a short whole one together. Closing the iterator ends the call."""
        stub = self._links.stub(self._view(worker))
        short = request.whole_samples and request.sampling.max_tokens <= SHORT_TOKENS and not request.extras
        if short and worker not in self._links.older:
            at_once = await self._at_once(stub, worker, request, left_s)
            if at_once is not None:
                for event in unpacked(at_once):
                    yield event
                return
        call = stub.Generate(request, timeout=left_s, metadata=self._links.metadata)
        with self._watched(worker, call):
            async for message in call:
                for event in unpacked(message):
                    yield event

    async def _at_once(
        self, stub: Any, worker: str, request: rollout_pb2.GenerateRequest, left_s: float
    ) -> rollout_pb2.GenerateEvent | None:
        """All events of a sample; None if the worker is too old to be asked so, which is remembered."""
        call = stub.GenerateAtOnce(request, timeout=left_s, metadata=self._links.metadata)
        with self._watched(worker, call):
            try:
                reply: rollout_pb2.GenerateEvent = await call
            except grpc.RpcError as error:
                if not lacks_method(error):
                    raise
                self._links.older.add(worker)
                return None
            return reply

    async def score(
        self, worker: str, request: rollout_pb2.ScoreTokensRequest, left_s: float
    ) -> rollout_pb2.ScoreTokensReply:
        """Logprobs of given tokens."""
        stub = self._links.stub(self._view(worker))
        call = stub.ScoreTokens(request, timeout=left_s, metadata=self._links.metadata)
        with self._watched(worker, call):
            reply: rollout_pb2.ScoreTokensReply = await call
            return reply

    def end(self, worker: str, why: str) -> None:
        """Break off all calls to a worker; whoever waits for one hears WORKER_LOST."""
        for open_call in self._open.get(worker, ()):
            open_call.lost = why
            open_call.call.cancel()

    def _view(self, worker: str) -> WorkerView:
        view = self._fleet.registry.worker(worker)
        if view is None or view.state.gone:
            raise retryable(Reason.WORKER_LOST, f"worker {worker} is gone")
        return view

    @contextmanager
    def _watched(self, worker: str, call: Any) -> Iterator[None]:
        open_call = _Call(call)
        self._open.setdefault(worker, []).append(open_call)
        try:
            yield
        except grpc.RpcError as error:
            raise meaning(error, worker) from error
        except asyncio.CancelledError:
            if open_call.lost and not _cancelled():
                raise retryable(Reason.WORKER_LOST, f"worker {worker} is lost: {open_call.lost}") from None
            raise
        finally:
            call.cancel()
            self._open[worker].remove(open_call)
            if not self._open[worker]:
                del self._open[worker]


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
