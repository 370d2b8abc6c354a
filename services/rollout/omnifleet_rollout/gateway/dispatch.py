"""Fan a request out into samples, one worker call each; carry a sample on elsewhere when its worker is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import FinishReason
from omnifleet.wire import rollout_pb2
from omnifleet.wire.batches import unpacked
from omnifleet.wire.errors import from_detail, to_detail
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.gateway.accounts import Accounts
from omnifleet_rollout.gateway.budget import Budgets
from omnifleet_rollout.gateway.checks import check, one_sample
from omnifleet_rollout.gateway.flight import Flight
from omnifleet_rollout.gateway.links import Links, meaning
from omnifleet_rollout.gateway.pace import RetryPace
from omnifleet_rollout.gateway.placement import Placement
from omnifleet_rollout.gateway.progress import Decode, Progress
from omnifleet_rollout.gateway.routing import Router

log = logging.getLogger("omnifleet.gateway")

_LOST = (Reason.WORKER_LOST, Reason.UNAVAILABLE)
_PATIENCE = (Reason.VERSION_TOO_OLD, Reason.OVERLOADED)
_ELSEWHERE = (*_LOST, *_PATIENCE, Reason.DRAINING, Reason.FENCED)
_AVOID_S = 1.0
_VERSION_LOOK_S = 0.25
_GUARD_S = 0.05


@dataclass(slots=True)
class _Call:
    """An open worker call. lost: the registry gave the worker up."""

    call: Any
    lost: str = ""


class Dispatcher:
    """Owns what is in flight.

    eos, decode: what the tokenizer knows; they tell whether a sample had ended when its worker was lost.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        links: Links,
        counters: Counters,
        *,
        attempts: int,
        eos: Callable[[], Collection[int]] = tuple,
        decode: Callable[[], Decode | None] = lambda: None,
    ) -> None:
        self._fleet, self._links = fleet, links
        self.accounts = Accounts(counters)
        self._router = router
        self._placement = Placement(fleet, router)
        self._attempts = attempts
        self._eos, self._decode = eos, decode
        self._budgets, self._pace = Budgets(), RetryPace()
        self._flights: dict[str, Flight] = {}
        self._calls: dict[str, list[_Call]] = {}

    @property
    def waiting(self) -> int:
        """Samples without a worker."""
        return self._placement.waiting

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    # ------------------------------------------------------------------ one request

    async def generate(
        self, request: rollout_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[list[rollout_pb2.GenerateEvent], None]:
        """Events of all samples of a token request, those together that are ready together. `deadline`: event loop time.

        Raises OmnifleetError if nothing was made yet (refusals); later failures are events. Closing it ends the
        workers' calls.
        """
        check(request)
        if request.request_id in self._flights:
            raise OmnifleetError(Reason.CONFLICT, f"request {request.request_id} is in flight already")
        run, n = request.identity.run, request.sampling.n
        self._admit(run, n)
        flight = self._flights[request.request_id] = Flight.of(request, deadline)
        try:
            workers = await self._first(flight)
            for index, worker in enumerate(workers):
                self._start(flight, Progress(index, one_sample(request.sampling, index)), worker)
            async with aclosing(self._events(flight, n)) as batches:
                async for events in batches:
                    yield events
        finally:
            # The accounts first: where a cancelled scope cancels every wait again, `close` does not get to its end.
            del self._flights[request.request_id]
            self._router.dismiss(run, n)
            self._budgets.give_back(run, n - flight.finished)
            await flight.close()

    def expect_room(self, run: str, n: int) -> None:
        """Before work is done for a request of `n` samples. Raises OVERLOADED, LIMIT_EXCEEDED, as `generate` would."""
        try:
            self._router.admit(run, n, self._quota(run))
        except OmnifleetError as error:
            self._refuse(error)
            raise
        self._router.dismiss(run, n)

    def _refuse(self, error: OmnifleetError) -> None:
        if error.reason is Reason.OVERLOADED:
            error.retry_after_ms = max(error.retry_after_ms, int(1000 * self._pace.advise(_now())))
        self.accounts.refuse(error)

    def _admit(self, run: str, n: int) -> None:
        try:
            self._router.admit(run, n, self._quota(run))
            try:
                self._budgets.take(run, n, _now())
            except OmnifleetError:
                self._router.dismiss(run, n)
                raise
        except OmnifleetError as error:
            self._refuse(error)
            raise
        self.accounts.add(run, requests=1, samples=n)

    async def _first(self, flight: Flight) -> list[str]:
        try:
            return await self._placement.first(flight)
        except OmnifleetError as error:
            self._refuse(error)
            raise

    async def _events(self, flight: Flight, n: int) -> AsyncGenerator[list[rollout_pb2.GenerateEvent], None]:
        ended = 0
        held: list[rollout_pb2.GenerateEvent] = []
        while ended < n:
            events = await flight.get()
            kinds = [event.WhichOneof("event") for event in events]
            for kind, event in zip(kinds, events, strict=True):
                if kind == "failed" and flight.echo is None:
                    raise from_detail(event.failed.error)
            ended += kinds.count("finished") + kinds.count("failed")
            held += events
            if flight.request.whole_samples and kinds == ["prompt"]:
                continue  # it goes with the first sample
            yield held
            held = []

    def abort(self, request_ids: Sequence[str]) -> int:
        """End requests now: their samples finish with reason `abort` and what they have. Returns how many."""
        flights = [self._flights[id] for id in request_ids if id in self._flights]
        for flight in flights:
            flight.abort()
        return len(flights)

    def stop(self) -> None:
        """The gateway is stopping: every sample in flight fails, retryable."""
        error = retryable(Reason.UNAVAILABLE, "the gateway is stopping", retry_after_ms=1000)
        for flight in self._flights.values():
            flight.break_off(error)

    # ------------------------------------------------------------------ one sample

    def _start(self, flight: Flight, progress: Progress, worker: str) -> None:
        flight.placed[progress.index] = worker
        task = asyncio.create_task(self._sample(flight, progress, worker))
        task.add_done_callback(partial(self._settle, flight, progress))
        flight.tasks.append(task)

    def _settle(self, flight: Flight, progress: Progress, task: asyncio.Task[None]) -> None:
        """What a sample's task could not do itself: cancelled (perhaps before its first step), or ended by a defect."""
        if (worker := flight.placed.pop(progress.index, None)) is not None:
            self._router.give_back(worker)
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
        """From worker to worker until the sample is complete. `worker` is taken; it is given back here."""
        failures: Counter[Reason] = Counter()
        avoid: dict[str, float] = {}
        while True:
            try:
                done = await self._call(flight, progress, worker)
                self._end(flight, progress, done)
                return
            except OmnifleetError as error:
                failures[error.reason] += 1
                self._judge(flight, progress, error, failures)
                avoid[worker] = _now() + _pause(error)
                if error.reason in _LOST:
                    self._fleet.lost(worker, error.message)
                self.accounts.note("retries")
                log.info("request %s sample %d: %s", flight.request.request_id, progress.index, error)
            finally:
                self._router.give_back(worker)
            if flight.extras and progress.token_ids:
                self._begin_again(flight, progress, worker)
            reason = progress.complete(self._eos(), self._decode())
            if reason is not None:
                self._end(flight, progress, progress.finished(reason))
                return
            worker = await self._placement.again(flight, avoid)
            if progress.token_ids:
                self.accounts.note("continuations")

    def _begin_again(self, flight: Flight, progress: Progress, worker: str) -> None:
        """Of a sample that must have more than tokens. Raises WORKER_LOST if the caller has seen tokens of it."""
        if not flight.request.whole_samples:
            raise retryable(
                Reason.WORKER_LOST, f"{', '.join(flight.extras)} of the tokens so far went with {worker}"
            )
        progress.begin_again()
        self.accounts.note("begun_again")

    def _judge(
        self, flight: Flight, progress: Progress, error: OmnifleetError, failures: Counter[Reason]
    ) -> None:
        """Return if the sample may go on elsewhere, else raise the error."""
        if error.reason in _PATIENCE:
            return  # not a failure; the wait for a worker ends at the deadline
        broken = sum(count for reason, count in failures.items() if reason not in _PATIENCE)
        once = error.reason is Reason.ENGINE_ERROR and failures[Reason.ENGINE_ERROR] == 1
        if broken >= self._attempts or not (error.reason in _ELSEWHERE or once):
            raise error

    async def _call(self, flight: Flight, progress: Progress, worker: str) -> rollout_pb2.GenerateEvent:
        """One worker call to its end; returns the sample's last event."""
        view = self._view(worker)
        left = max(0.0, flight.deadline - _now())
        request = self._request_of(flight, progress)
        stub = self._links.stub(view)
        open_call = _Call(stub.Generate(request, timeout=left, metadata=self._links.metadata))
        self._calls.setdefault(worker, []).append(open_call)
        try:
            async for message in open_call.call:
                for event in unpacked(message):
                    if await self._take(flight, progress, event):
                        return event
        except grpc.RpcError as error:
            raise meaning(error, worker) from error
        except asyncio.CancelledError:
            if open_call.lost and not _cancelled():
                raise retryable(Reason.WORKER_LOST, f"worker {worker} is lost: {open_call.lost}") from None
            raise
        finally:
            open_call.call.cancel()
            self._calls[worker].remove(open_call)
            if not self._calls[worker]:
                del self._calls[worker]
        raise retryable(Reason.WORKER_LOST, f"worker {worker} ended the stream without an end of the sample")

    def _view(self, worker: str) -> WorkerView:
        view = self._fleet.registry.worker(worker)
        if view is None or view.state.gone:
            raise retryable(Reason.WORKER_LOST, f"worker {worker} is gone")
        return view

    async def _take(self, flight: Flight, progress: Progress, event: rollout_pb2.GenerateEvent) -> bool:
        """Pass one worker event on. True if it ends the sample; the caller then passes it on."""
        event.sample = progress.index
        match event.WhichOneof("event"):
            case "prompt":
                await flight.see(event.prompt)
            case "chunk":
                progress.take(event.chunk)
                self.accounts.add(flight.ask.run, tokens=len(event.chunk.token_ids))
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

    def _end(self, flight: Flight, progress: Progress, event: rollout_pb2.GenerateEvent) -> None:
        self.accounts.add(flight.ask.run, samples_finished=1)
        self._pace.ended(_now())
        flight.finished += event.finished.finish_reason != FinishReason.ABORT
        if flight.request.whole_samples:
            flight.put_last(progress.whole())
        flight.put_last(event)

    def _fail(self, flight: Flight, progress: Progress, error: OmnifleetError) -> None:
        self.accounts.add(flight.ask.run, samples_failed=1)
        self.accounts.refuse(error)
        failed = rollout_pb2.SampleFailed(error=to_detail(error))
        flight.put_last(rollout_pb2.GenerateEvent(sample=progress.index, failed=failed))

    # ------------------------------------------------------------------ one worker

    async def follow(self) -> None:
        """For ever: end the calls of workers that are given up, close the channels of those that are gone."""
        while True:
            moved = self._fleet.moved
            living = {w.id for w in self._fleet.registry.workers()}
            for id in filter(self._fleet.registry.given_up, self._calls):
                view = self._fleet.registry.worker(id)
                for open_call in self._calls[id]:
                    open_call.lost = f"{view.state}: {view.note}" if view else "gone"
                    open_call.call.cancel()
            self._router.forget(living)
            await self._links.keep(living | self._calls.keys())
            await moved.wait()

    async def score_tokens(
        self, request: rollout_pb2.ScoreTokensRequest, deadline: float
    ) -> rollout_pb2.ScoreTokensReply:
        """Forward to a worker; to another one if it is lost."""
        alike = rollout_pb2.GenerateRequest(media=request.media, sampling=rollout_pb2.Sampling(n=1))
        flight, avoid = Flight.of(alike, deadline), dict[str, float]()
        for _ in range(self._attempts):
            worker = await self._placement.again(flight, avoid)
            try:
                view = self._view(worker)
                reply: rollout_pb2.ScoreTokensReply = await self._links.stub(view).ScoreTokens(
                    request, timeout=max(0.0, deadline - _now()), metadata=self._links.metadata
                )
                return reply
            except grpc.RpcError as rpc_error:
                error = meaning(rpc_error, worker)
                if error.reason not in _ELSEWHERE:
                    raise error from rpc_error
                avoid[worker] = _now() + _AVOID_S
            except asyncio.CancelledError:
                if _cancelled():
                    raise
                error = retryable(Reason.WORKER_LOST, f"worker {worker} is gone")  # and so is its channel
                avoid[worker] = _now() + _AVOID_S
            finally:
                self._router.give_back(worker)
        raise retryable(
            Reason.NO_WORKER, f"{self._attempts} workers could not score: {error}", knob="gateway.attempts"
        )

    def load(self, worker: WorkerView) -> int:
        """Samples that the gateway has on a worker."""
        return self._router.samples(worker.id)

    # ------------------------------------------------------------------ accounts

    def budget(self, run: str, samples: int) -> int:
        """The run may start this many samples from now on; what was left of its last budget."""
        return self._budgets.set(run, samples, _now())

    def _quota(self, run: str) -> int:
        return sum(pool.quota for pool in self._fleet.registry.pools_of(run) if pool.run == run)

    def _priority(self, run: str) -> int:
        return min(
            (pool.priority for pool in self._fleet.registry.pools_of(run) if pool.run == run), default=0
        )


def _pause(error: OmnifleetError) -> float:
    if error.reason is Reason.VERSION_TOO_OLD:
        return _VERSION_LOOK_S
    return error.retry_after_ms / 1000 or _AVOID_S


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _now() -> float:
    return asyncio.get_running_loop().time()
