"""Who may serve a request now, and waiting until somebody may."""

from __future__ import annotations

import asyncio
from collections import Counter

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_rollout.fleet.service import Fleet, wait_for
from omnifleet_rollout.gateway.flight import Flight
from omnifleet_rollout.gateway.routing import Router

_LOOK_S = 0.25
_SERVING = (WorkerState.READY, WorkerState.CORDONED)


class Placement:
    """Fleet and router together. `waiting`: samples that have no worker now."""

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet = fleet
        self._registry = fleet.registry
        self.router = router
        self.waiting = 0

    async def first(self, flight: Flight) -> list[str]:
        """A worker for each sample, all or none, preferably one for all. Raises OVERLOADED when queues are full."""
        n = flight.request.sampling.n
        workers = await self.eligible(flight, {}, n)
        placed: list[str] = []
        try:
            for _ in range(n):
                placed.append(self._place(flight, workers))
        except OmnifleetError:
            for worker in placed:
                self.router.give_back(worker)
            raise
        return placed

    async def again(self, flight: Flight, avoid: dict[str, float]) -> str:
        """A worker for a sample whose last one is to be avoided. Waits for room until the deadline."""
        while True:
            workers = await self.eligible(flight, avoid, 1)
            try:
                return self._place(flight, workers)
            except OmnifleetError as error:
                if error.reason is not Reason.OVERLOADED or _now() + _LOOK_S > flight.deadline:
                    raise
            await asyncio.sleep(_LOOK_S)

    async def eligible(self, flight: Flight, avoid: dict[str, float], samples: int) -> list[WorkerView]:
        """Workers that serve the run and fit the version bound. Waits for one until the deadline.

        avoid: worker -> time until which it is not asked. Raises NO_WORKER or VERSION_TOO_OLD at the deadline,
        VERSION_MOVED at once if every worker is past an exact version, CONFLICT if it is aborted.
        """
        self.waiting += samples
        try:
            while not flight.aborted and flight.broken is None:
                moved = self._fleet.moved
                serving = self.serving(flight.ask.run, self.router.home(flight.ask))
                fit = [w for w in serving if _admits(flight, w) and avoid.get(w.id, 0.0) <= _now()]
                if fit:
                    return fit
                _check_exact(flight, serving)
                left = flight.deadline - _now()
                if left <= 0:
                    raise self._nobody(flight, serving)
                await wait_for(moved, min(left, _LOOK_S))
            raise flight.broken or OmnifleetError(Reason.CONFLICT, "aborted before it had a worker")
        finally:
            self.waiting -= samples

    def serving(self, run: str, home: str = "") -> list[WorkerView]:
        """READY workers of the run's pools, and `home` even if it is cordoned."""
        pools = {pool.name for pool in self._registry.pools_of(run)}
        return [
            w
            for w in self._registry.workers()
            if w.pool in pools and (w.state is WorkerState.READY or (w.id == home and w.state in _SERVING))
        ]

    def _place(self, flight: Flight, workers: list[WorkerView]) -> str:
        worker = self.router.place(flight.ask, workers, prefer=flight.home)
        flight.home = flight.home or worker
        self.router.take(worker, flight.ask.digests)
        return worker

    def _nobody(self, flight: Flight, serving: list[WorkerView]) -> OmnifleetError:
        if not serving:
            states = Counter(str(w.state) for w in self._registry.workers())
            found = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none joined"
            return retryable(
                Reason.NO_WORKER,
                f"no worker is ready for run {flight.ask.run or 'default'}: {found}",
                knob="omnifleet fleet scale",
                retry_after_ms=1000,
            )
        newest = max((w.version for w in serving if w.version), key=lambda v: v.number, default=None)
        wanted = flight.bound.exact or flight.bound.min
        return OmnifleetError(
            Reason.VERSION_TOO_OLD,
            f"no worker reached {wanted} before the deadline; the newest serves {newest}",
            retryable=True,
            knob="weight_version",
            retry_after_ms=1000,
            current_version=newest,
        )


def _admits(flight: Flight, worker: WorkerView) -> bool:
    if worker.version is None:
        return flight.bound.min is None and flight.bound.exact is None
    return flight.bound.admits(worker.version)


def _check_exact(flight: Flight, serving: list[WorkerView]) -> None:
    exact = flight.bound.exact
    versions: list[WeightVersion] = [w.version for w in serving if w.version is not None]
    if exact is None or not versions:
        return
    if all(v.same_lineage(exact) and v.number > exact.number for v in versions):
        oldest = min(versions, key=lambda v: v.number)
        raise OmnifleetError(
            Reason.VERSION_MOVED,
            f"every worker is past {exact}; the oldest serves {oldest}",
            retryable=True,
            knob="weight_version",
            current_version=oldest,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
