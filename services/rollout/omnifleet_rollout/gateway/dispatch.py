"""Requests: admission, their samples fanned out to workers, and their accounts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.wire import rollout_pb2
from omnifleet.wire.errors import from_detail
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.gateway.accounts import Accounts
from omnifleet_rollout.gateway.budget import Budgets
from omnifleet_rollout.gateway.calls import Calls
from omnifleet_rollout.gateway.carrying import AVOID_S, ELSEWHERE, Carrier
from omnifleet_rollout.gateway.checks import check, one_sample
from omnifleet_rollout.gateway.flight import Flight
from omnifleet_rollout.gateway.links import Links
from omnifleet_rollout.gateway.pace import RetryPace
from omnifleet_rollout.gateway.placement import Placement
from omnifleet_rollout.gateway.progress import Decode, Progress
from omnifleet_rollout.gateway.routing import Router


class Dispatcher:
    """Owns what is in flight. eos, decode: see `Carrier`."""

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
        self._fleet, self._links, self._router = fleet, links, router
        self.accounts = Accounts(counters)
        self._placement = Placement(fleet, router)
        self._attempts = attempts
        self._budgets, self._pace = Budgets(), RetryPace()
        self._flights: dict[str, Flight] = {}
        self._calls = Calls(fleet, links)
        self._carrier = Carrier(
            fleet,
            self._calls,
            self._placement,
            self.accounts,
            self._pace,
            attempts=attempts,
            priority=self._priority,
            eos=eos,
            decode=decode,
        )

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
                self._carrier.start(flight, Progress(index, one_sample(request.sampling, index)), worker)
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

    # ------------------------------------------------------------------ workers

    async def follow(self) -> None:
        """For ever: end the calls of workers that are given up, close the channels of those that are gone."""
        registry = self._fleet.registry
        while True:
            moved = self._fleet.moved
            living = {w.id for w in registry.workers()}
            for id in filter(registry.given_up, self._calls.workers):
                view = registry.worker(id)
                self._calls.end(id, f"{view.state}: {view.note}" if view else "gone")
            self._router.forget(living)
            await self._links.keep(living | self._calls.workers)
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
                return await self._calls.score(worker, request, max(0.0, deadline - _now()))
            except OmnifleetError as refusal:
                if refusal.reason not in ELSEWHERE:
                    raise
                error = refusal
                avoid[worker] = _now() + AVOID_S
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


def _now() -> float:
    return asyncio.get_running_loop().time()
