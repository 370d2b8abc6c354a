"""Brings each worker that is not at the newest version there, alone: newcomers, late ones, and those whose refit failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from omnifleet.client.fleet import FleetClient, FleetView, WorkerView
from omnifleet.errors import OmnifleetError
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_trainer.refit.delivery import Delivery
from omnifleet_trainer.refit.sightings import sightings
from omnifleet_trainer.refit.watch import Watch

log = logging.getLogger("omnifleet.trainer.refit")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_AT_ONCE = 4
_ATTEMPTS = 3
_DEAF = (
    WorkerState.JOINING,
    WorkerState.DRAINING,
    WorkerState.DEAD,
    WorkerState.RETIRED,
    WorkerState.SUSPECT,
)
"""States in which a worker is sent nothing: its engine is not up, or it will not serve."""


def reachable(view: FleetView) -> list[WorkerView]:
    """Workers that can be sent something."""
    return [worker for worker in view.workers if worker.state not in _DEAF]


class CatchingUp:
    """behind: catch-ups that run, by worker. Set `wake` for a look now; while `resting` nobody is brought up."""

    def __init__(
        self,
        delivery: Delivery,
        watch: Watch,
        newest: Callable[[], Any],
        announce: Callable[[WeightVersion], Awaitable[None]],
        bring: Callable[[WorkerView, Any], Awaitable[WeightVersion]],
        spoken_for: Callable[[WorkerView], bool],
    ) -> None:
        """newest: what stands for the version published last, or None; bring: sends it; spoken_for: by a publish that runs."""
        self._delivery, self._watch, self._newest = delivery, watch, newest
        self._announce, self._bring, self._spoken_for = announce, bring, spoken_for
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.behind: dict[str, asyncio.Task[None]] = {}
        self.wake = asyncio.Event()
        self.resting = False

    async def run(self, fleet: FleetClient, pool: str) -> None:
        """Until cancelled; a registry that is away is asked again."""
        pause = _FIRST_PAUSE_S
        try:
            while True:
                try:
                    async with aclosing(sightings(fleet, pool, self.wake)) as views:
                        async for view in views:
                            pause = _FIRST_PAUSE_S
                            await self._look(view)
                except OmnifleetError as error:
                    log.warning("the fleet cannot be watched: %s; again in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """End all catch-ups. Idempotent."""
        tasks = list(self.behind.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, view: FleetView) -> None:
        release = self._newest()
        if release is None or self.resting:
            return
        target = view.target_version
        if (
            target is None
            or not target.same_lineage(release.version)
            or target.number < release.version.number
        ):
            await self._announce(release.version)
        for worker in reachable(view):
            if worker.id in self.behind or self._spoken_for(worker):
                continue
            if worker.id in self._watch.busy or self._watch.given_up(worker.id, release.version):
                continue
            if self._is_behind(worker, release.version):
                task = asyncio.create_task(self._catch_up(worker), name=f"catch-up {worker.id}")
                self.behind[worker.id] = task
                task.add_done_callback(partial(self._caught_up, worker.id))
        living = {worker.id for worker in view.workers}
        self._delivery.keep(living)
        self._watch.keep(living)

    def _caught_up(self, worker: str, _: asyncio.Task[None]) -> None:
        self.behind.pop(worker, None)

    def _is_behind(self, worker: WorkerView, version: WeightVersion) -> bool:
        serves = self._delivery.serves(worker)
        return serves is None or serves.number < version.number

    async def _catch_up(self, worker: WorkerView) -> None:
        """Send the current version until the worker has it; the next snapshot tells if the worker is gone."""
        pause = _FIRST_PAUSE_S
        for _ in range(_ATTEMPTS):
            release = self._newest()
            if release is None:
                return
            try:
                async with self._slots, self._delivery.turn(worker.id):
                    log.info("%s caught up with %s", worker.id, await self._bring(worker, release))
                    why = await self._watch.over(worker, release.version)
                    if not why or self._watch.given_up(worker.id, release.version):
                        return
            except (OmnifleetError, OSError) as error:
                log.warning("%s cannot catch up with %s: %s", worker.id, release.version, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
