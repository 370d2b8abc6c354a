"""Requests around a change of weights: who must not see two versions goes first, the others stand still meanwhile."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import InFlight
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.worker.gate import Ending, Flight, Gate
from omnifleet_rollout.worker.rest import Rest

log = logging.getLogger("omnifleet.rollout.refit")


class Clearing:
    """Of one worker."""

    def __init__(self, engine: Engine, gate: Gate, rest: Rest) -> None:
        self._engine, self._gate, self._rest = engine, gate, rest

    @property
    def running(self) -> int:
        """Samples that would go on."""
        return sum(flight.ending is None for flight in self._gate.inside)

    async def clear(self, policy: InFlight, deadline_s: float) -> None:
        """Close the gate and let those finish who must not see two versions. Raises DEADLINE, nothing changed."""
        self._gate.close(exact_only=True)
        asleep = self._rest.asleep  # nobody finishes then
        if asleep or not await self._gate.until_gone(deadline_s / 2, _is_exact):
            await self._engine.abort(self._gate.end(Ending.MOVED, _is_exact))
        self._gate.close()
        if policy is InFlight.DRAIN and not asleep and not await self._gate.until_gone(deadline_s / 2):
            left = len(self._gate.inside)
            raise retryable(Reason.DEADLINE, f"{left} samples were still running; the old version serves on")
        if policy is InFlight.KEEP:
            # A request that has no token yet may still find KV that its siblings made with the old weights: it starts again.
            await self._engine.abort(self._gate.end(Ending.RESTART, lambda flight: flight.tokens == 0))

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Inside, the engine makes no step. Raises ENGINE_ERROR if it does not come to rest."""
        try:
            if not self._rest.asleep:
                await self._engine.pause()
            yield
        finally:
            if not self._rest.asleep:
                await self._quietly(self._engine.resume(), "resume")

    def reopen(self) -> None:
        """Let requests in again, unless the engine sleeps."""
        if not self._rest.asleep:
            self._gate.open()

    async def end(self, ending: Ending) -> None:
        """End all that run, whatever the engine says to it."""
        await self._quietly(self._engine.abort(self._gate.end(ending)), "abort")

    async def _quietly(self, step: Awaitable[None], what: str) -> None:
        """A dead engine must not hide the error that came first; `alive` tells of it."""
        try:
            await step
        except (OmnifleetError, RuntimeError, OSError) as error:
            log.error("cannot %s the engine: %s", what, error)


def _is_exact(flight: Flight) -> bool:
    return flight.bound.exact is not None
