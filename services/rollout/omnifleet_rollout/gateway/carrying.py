"""A sample's way: one worker call after another until it is complete, each going on from the tokens of those before."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from functools import partial

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import FinishReason
from omnifleet.wire import rollout_pb2
from omnifleet.wire.errors import from_detail, to_detail
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.gateway.accounts import Accounts
from omnifleet_rollout.gateway.calls import Calls
from omnifleet_rollout.gateway.flight import Flight
from omnifleet_rollout.gateway.pace import RetryPace
from omnifleet_rollout.gateway.placement import Placement
from omnifleet_rollout.gateway.progress import Decode, Progress

log = logging.getLogger("omnifleet.gateway")

LOST = (Reason.WORKER_LOST, Reason.UNAVAILABLE)
PATIENCE = (Reason.VERSION_TOO_OLD, Reason.OVERLOADED)
ELSEWHERE = (*LOST, *PATIENCE, Reason.DRAINING, Reason.FENCED)
AVOID_S = 1.0
_VERSION_LOOK_S = 0.25
_GUARD_S = 0.05


class Carrier:
    """Runs the samples of flights as tasks. A worker that is handed over with a sample is taken; it is given back here.

    eos, decode: what the tokenizer knows; they tell whether a sample had ended when its worker was lost.
    priority: of a run.
    """

    def __init__(
        self,
        fleet: Fleet,
        calls: Calls,
        placement: Placement,
        accounts: Accounts,
        pace: RetryPace,
        *,
        attempts: int,
        priority: Callable[[str], int],
        eos: Callable[[], Collection[int]],
        decode: Callable[[], Decode | None],
    ) -> None:
        self._fleet, self._calls, self._placement = fleet, calls, placement
        self._accounts, self._pace = accounts, pace
        self._attempts, self._priority = attempts, priority
        self._eos, self._decode = eos, decode

    def start(self, flight: Flight, progress: Progress, worker: str) -> None:
        """Begin with a sample; its events and its end come into the flight's queue."""
        flight.placed[progress.index] = worker
        task = asyncio.create_task(self._sample(flight, progress, worker))
        task.add_done_callback(partial(self._settle, flight, progress))
        flight.tasks.append(task)

    def _settle(self, flight: Flight, progress: Progress, task: asyncio.Task[None]) -> None:
        """What a sample's task could not do itself: cancelled (perhaps before its first step), or ended by a defect."""
        if (worker := flight.placed.pop(progress.index, None)) is not None:
            self._placement.router.give_back(worker)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                log.error("request %s broke off", flight.request.request_id, exc_info=error)
                message = f"{type(error).__name__}: {error}"
                self._fail(flight, progress, OmnifleetError(Reason.INTERNAL, message))
        elif flight.aborted:
            self._end(flight, progress, progress.finished(FinishReason.ABORT))
        elif flight.broken is not None:
            self._fail(flight, progress, flight.broken)

    async def _sample(self, flight: Flight, progress: Progress, worker: str) -> None:
        del flight.placed[progress.index]  # from here on `_carry` gives it back
        try:
            async with asyncio.timeout_at(flight.deadline + _GUARD_S):
                await self._carry(flight, progress, worker)
        except TimeoutError:
            self._fail(
                flight, progress, retryable(Reason.DEADLINE, "the reply was not ready before the deadline")
            )
        except OmnifleetError as error:
            self._fail(flight, progress, error)

    async def _carry(self, flight: Flight, progress: Progress, worker: str) -> None:
        """From worker to worker until the sample is complete."""
        failures: Counter[Reason] = Counter()
        avoid: dict[str, float] = {}
        while True:
            try:
                done = await self._call(flight, progress, worker)
                self._end(flight, progress, done)
                return
            except OmnifleetError as error:
                failures[error.reason] += 1
                self._judge(error, failures)
                avoid[worker] = _now() + _pause(error)
                if error.reason in LOST:
                    self._fleet.lost(worker, error.message)
                self._accounts.note("retries")
                log.info("request %s sample %d: %s", flight.request.request_id, progress.index, error)
            finally:
                self._placement.router.give_back(worker)
            if flight.extras and progress.token_ids:
                self._begin_again(flight, progress, worker)
            reason = progress.complete(self._eos(), self._decode())
            if reason is not None:
                self._end(flight, progress, progress.finished(reason))
                return
            worker = await self._placement.again(flight, avoid)
            if progress.token_ids:
                self._accounts.note("continuations")

    def _judge(self, error: OmnifleetError, failures: Counter[Reason]) -> None:
        """Return if the sample may go on elsewhere, else raise the error."""
        if error.reason in PATIENCE:
            return  # not a failure; the wait for a worker ends at the deadline
        broken = sum(count for reason, count in failures.items() if reason not in PATIENCE)
        once = error.reason is Reason.ENGINE_ERROR and failures[Reason.ENGINE_ERROR] == 1
        if broken >= self._attempts or not (error.reason in ELSEWHERE or once):
            raise error

    def _begin_again(self, flight: Flight, progress: Progress, worker: str) -> None:
        """Of a sample that must have more than tokens. Raises WORKER_LOST if the caller has seen tokens of it."""
        if not flight.request.whole_samples:
            raise retryable(
                Reason.WORKER_LOST, f"{', '.join(flight.extras)} of the tokens so far went with {worker}"
            )
        progress.begin_again()
        self._accounts.note("begun_again")

    # ------------------------------------------------------------------ one call

    async def _call(self, flight: Flight, progress: Progress, worker: str) -> rollout_pb2.GenerateEvent:
        """One worker call to its end; returns the sample's last event."""
        request, left_s = self._request_of(flight, progress), max(0.0, flight.deadline - _now())
        async with aclosing(self._calls.generate(worker, request, left_s)) as events:
            async for event in events:
                if await self._take(flight, progress, event):
                    return event
        raise retryable(Reason.WORKER_LOST, f"worker {worker} ended the stream without an end of the sample")

    def _request_of(self, flight: Flight, progress: Progress) -> rollout_pb2.GenerateRequest:
        request = rollout_pb2.GenerateRequest()
        request.CopyFrom(flight.request)
        request.request_id = f"{flight.request.request_id}-{progress.index}"
        request.identity.sample += progress.index
        request.sampling.CopyFrom(progress.sampling)
        request.batched = True
        request.priority = request.priority or self._priority(flight.ask.run)
        continuation = progress.continuation()
        if continuation is not None:
            request.continuation.CopyFrom(continuation)
        return request

    async def _take(self, flight: Flight, progress: Progress, event: rollout_pb2.GenerateEvent) -> bool:
        """Pass one worker event on. True if it ends the sample; the caller then passes it on."""
        event.sample = progress.index
        match event.WhichOneof("event"):
            case "prompt":
                await flight.see(event.prompt)
            case "chunk":
                progress.take(event.chunk)
                self._accounts.add(flight.ask.run, tokens=len(event.chunk.token_ids))
                if not flight.request.whole_samples:
                    await flight.put(event)
            case "finished":
                if event.finished.finish_reason == FinishReason.ABORT:
                    raise retryable(Reason.WORKER_LOST, "the worker gave the sample up")
                progress.finish(event.finished)
                return True
            case "failed":
                raise from_detail(event.failed.error)
        return False

    # ------------------------------------------------------------------ its end

    def _end(self, flight: Flight, progress: Progress, event: rollout_pb2.GenerateEvent) -> None:
        self._accounts.add(flight.ask.run, samples_finished=1)
        self._pace.ended(_now())
        flight.finished += event.finished.finish_reason != FinishReason.ABORT
        if flight.request.whole_samples:
            flight.put_last(progress.whole())
        flight.put_last(event)

    def _fail(self, flight: Flight, progress: Progress, error: OmnifleetError) -> None:
        self._accounts.add(flight.ask.run, samples_failed=1)
        self._accounts.refuse(error)
        failed = rollout_pb2.SampleFailed(error=to_detail(error))
        flight.put_last(rollout_pb2.GenerateEvent(sample=progress.index, failed=failed))


def _pause(error: OmnifleetError) -> float:
    if error.reason is Reason.VERSION_TOO_OLD:
        return _VERSION_LOOK_S
    return error.retry_after_ms / 1000 or AVOID_S


def _now() -> float:
    return asyncio.get_running_loop().time()
