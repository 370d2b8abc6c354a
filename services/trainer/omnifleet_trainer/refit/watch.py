"""What follows from the canary: a worker that it tells against is quarantined and put back to the version before."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet_trainer.refit.delivery import Delivery
from omnifleet_trainer.refit.guard import Guard

log = logging.getLogger("omnifleet.trainer.refit")
_CHANCES = 2
"""Times that one version is sent to a worker, whole the second time; then it waits for the next version."""


class Watch:
    """Verdicts by worker. `guard`: None = nothing is asked."""

    def __init__(
        self,
        delivery: Delivery,
        previous: Callable[[], Any],
        restore: Callable[[WorkerView, Any], Awaitable[WeightVersion]],
    ) -> None:
        """previous: what stands for the version before the newest, or None; restore: sends it to a worker, whole."""
        self._delivery, self._previous, self._restore = delivery, previous, restore
        self.guard: Guard | None = None
        self.busy: set[str] = set()
        """Workers that are looked at or put back now: nothing else is sent to them."""
        self._refused: dict[str, list[int]] = {}

    async def over(self, worker: WorkerView, version: WeightVersion) -> str:
        """ "" if the worker computes what the trainer does at `version`; else why not, and what it serves now."""
        if self.guard is None:
            return ""
        self.busy.add(worker.id)
        try:
            await self.guard.check(worker, version.number)
        except OmnifleetError as error:
            if error.reason is not Reason.CORRUPT:
                log.warning("%s cannot be asked for the canary: %s", worker.id, error)
                return ""
            self._refused.setdefault(worker.id, []).append(version.number)
            log.error("%s is quarantined at %s: %s", worker.id, version, error)
            why = f"{error}; {await self._put_back(worker, version, str(error))}"
            log.error("%s at %s: %s", worker.id, version, why)
            return why
        finally:
            self.busy.discard(worker.id)
        self._refused.pop(worker.id, None)
        return ""

    def given_up(self, worker: str, version: WeightVersion) -> bool:
        """True if the canary told against a worker at this version so often that sending it again would not help."""
        return self._refused.get(worker, []).count(version.number) >= _CHANCES

    def keep(self, living: set[str]) -> None:
        """Forget workers that are gone."""
        self._refused = {id: numbers for id, numbers in self._refused.items() if id in living}

    async def _put_back(self, worker: WorkerView, version: WeightVersion, why: str) -> str:
        """Quarantine, then the version before, whole, which the canary must let pass; says what came of it."""
        previous = self._previous()
        try:
            await self._delivery.quarantine(worker, why)
            if previous is None or previous.version.number >= version.number:
                return "it serves nothing: there is no version before to put it back to"
            if previous.version.number in self._refused[worker.id]:
                return f"it serves nothing: the canary told against {previous.version} too"
            at = await self._restore(worker, previous)
        except OmnifleetError as error:
            return f"it could not be put back: {error}"
        finally:
            self._delivery.distrust(worker.id)
        return await self._verified(worker, at)

    async def _verified(self, worker: WorkerView, at: WeightVersion) -> str:
        assert self.guard is not None
        try:
            await self.guard.check(worker, at.number)
            return f"it serves {at} again"
        except OmnifleetError as error:
            await self._fence(worker, str(error))
            return f"it serves nothing: put back to {at}, {error}"

    async def _fence(self, worker: WorkerView, why: str) -> None:
        try:
            await self._delivery.quarantine(worker, why)
        except OmnifleetError as error:
            log.error("%s could not be told to serve nothing: %s", worker.id, error)
