"""An engine that shares its device with the trainer: asleep while the trainer has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.worker.gate import Ending, Flight, Gate

log = logging.getLogger("omnifleet.rollout.rest")
DEEPEST = 2


class Rest:
    """Whether the engine sleeps, and at which level (see `Engine.sleep`). The receiver makes its calls one at a time.

    What a request sees: it waits at the gate, or, if it was running, goes on after the sleep with the tokens it has.
    """

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._level: int | None = None
        self._weights_there = True
        self._readers = 0

    @property
    def asleep(self) -> bool:
        """True from the begin of a sleep to the end of the waking."""
        return self._level is not None

    @property
    def level(self) -> int:
        """At which it sleeps; 0 if it does not."""
        return self._level or 0

    def check_weights(self) -> None:
        """Raises CONFLICT, retryable, while the weights have no memory that a refit could write into."""
        if not self._weights_there:
            raise retryable(
                Reason.CONFLICT, "the engine sleeps and its weights are not in memory: wake them first"
            )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, nobody takes the weights' memory away. Raises CONFLICT, retryable, while it is."""
        self.check_weights()
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    async def sleep(self, level: int) -> int:
        """Give the device up; how many samples were running. Asleep like this already: nothing happens.

        Raises INVALID_REQUEST, CONFLICT while the weights are read, and ENGINE_ERROR: the engine then serves on, or is
        not alive any more.
        """
        if not 0 <= level <= DEEPEST:
            raise invalid(f"sleep level {level}; want 0 to {DEEPEST}", knob="rollout.sleep_level")
        if self._level == level and self._weights_there == (level == 0):
            return 0
        if level > 0 and self._readers:
            raise retryable(
                Reason.CONFLICT, "the weights are being lent to another worker", retry_after_ms=200
            )
        self._gate.close()
        running = sum(flight.ending is None for flight in self._gate.inside)
        if level > 0:
            # No KV will be left: they start again, behind the gate. An exact bound could not be kept across a refit.
            await self._engine.abort(self._gate.end(Ending.MOVED, _is_exact))
            await self._engine.abort(self._gate.end(Ending.RESTART))
        try:
            if self._level is not None:  # at another level, or a trainer died between two wakings
                await self._engine.wake(weights_only=False)
            await self._engine.sleep(level)
        except OmnifleetError:
            await self._awake_again()
            raise
        self._level, self._weights_there = level, level == 0
        if level == DEEPEST:
            self._gate.standing.raise_fence("the engine slept so deeply that its weights are gone")
        log.info("asleep at level %d, %d samples wait", level, running)
        return running

    async def wake(self, *, weights_only: bool) -> None:
        """Take the device back. Raises ENGINE_ERROR; the engine is then not alive any more."""
        if self._level is None or (weights_only and self._weights_there):
            return
        await self._engine.wake(weights_only=weights_only)
        self._weights_there = True
        if not weights_only:
            self._level = None
            self._gate.open()
            log.info("awake")

    async def _awake_again(self) -> None:
        self._level, self._weights_there = None, True
        if self._engine.alive():
            await self._engine.resume()
            self._gate.open()


def _is_exact(flight: Flight) -> bool:
    return flight.bound.exact is not None
