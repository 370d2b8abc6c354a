"""Credits: a prompt may start only if its group can be trained within the staleness budget.

Source of the rule: AReaL's staleness control, capacity = (bound + version + 1) x batch - (accepted + running).
"""

from __future__ import annotations

from omnifleet_trainer.loop.pulse import Pulse


def capacity(*, bound: int, version: int, batch: int, accepted: int, running: int) -> int:
    """Groups that may start now (negative: none, wait).

    bound: largest allowed lag in steps. version: weights that serve. batch: groups of a step. accepted: groups
    trained so far and ready ones. Weights at `version` may be trained on until step version + bound + 1, and that
    many steps take (bound + version + 1) x batch groups in all.
    """
    return (bound + version + 1) * batch - (accepted + running)


class Admission:
    """Hands out one credit a group. All state that must survive a restart is given at construction."""

    def __init__(
        self,
        *,
        bound: int,
        batch: int,
        buffer: int,
        version: int,
        trained: int,
        ready: int,
        at_once: int | None = None,
    ) -> None:
        """buffer: groups that may be ready or running at once. trained, ready: groups, from the ledger.

        at_once: groups that may be running at once, None = what budget and buffer allow.
        """
        self._at_once = at_once
        self._bound = bound
        self._batch = batch
        self._buffer = buffer
        self._version = version
        self._trained = trained
        self._ready = ready
        self._running = 0
        self._paused = False
        self._pulse = Pulse()

    @property
    def running(self) -> int:
        """Groups that were admitted and have not ended."""
        return self._running

    @property
    def ready(self) -> int:
        """Groups that wait for a step."""
        return self._ready

    @property
    def paused(self) -> bool:
        """True if nothing is admitted on an operator's word."""
        return self._paused

    def capacity(self) -> int:
        """Groups that may start now, whether paused or not."""
        within_budget = capacity(
            bound=self._bound,
            version=self._version,
            batch=self._batch,
            accepted=self._trained + self._ready,
            running=self._running,
        )
        room = within_budget if self._at_once is None else self._at_once - self._running
        return min(within_budget, self._buffer - self._ready - self._running, room)

    async def admit(self) -> None:
        """Wait for a credit and take it; give it back with `accepted` or `returned`."""
        await self._pulse.until(lambda: not self._paused and self.capacity() > 0)
        self._running += 1

    def accepted(self) -> None:
        """A running group is ready."""
        self._running -= 1
        self._ready += 1
        self._pulse.fire()

    def returned(self) -> None:
        """A running group ended without a result."""
        self._running -= 1
        self._pulse.fire()

    def expired(self, groups: int) -> None:
        """Ready groups were dropped as too old."""
        self._ready -= groups
        self._pulse.fire()

    def trained(self, groups: int) -> None:
        """Ready groups went into a step."""
        self._ready -= groups
        self._trained += groups
        self._pulse.fire()

    def serving(self, version: int) -> None:
        """Newer weights serve."""
        self._version = version
        self._pulse.fire()

    def pause(self) -> None:
        """Admit nothing until `resume`. Idempotent."""
        self._paused = True

    def resume(self) -> None:
        """Admit again. Idempotent."""
        self._paused = False
        self._pulse.fire()
