"""Who may enter the engine, who is inside, and who must wait while weights change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import VersionBound
from omnifleet_rollout.worker.standing import Standing

_RETRY_AFTER_MS = 200


class Ending(Enum):
    """Why the worker itself ended an engine request."""

    RESTART = auto()  # goes on after the gate with a fresh KV salt
    MOVED = auto()  # its exact bound could not be kept
    FENCED = auto()  # the weights are no longer whole
    CANCELLED = auto()  # AbortRequests
    LEAVING = auto()  # the drain's time is up


@dataclass(eq=False, slots=True)
class Flight:
    """One sample inside the worker. engine_id: its engine request of now; tokens: new ones from that request."""

    request_id: str
    bound: VersionBound
    engine_id: str = ""
    tokens: int = 0
    ending: Ending | None = None


@dataclass(eq=False)
class Gate:
    """Bounded admission. At most `limit` samples are inside or waiting; the next one is refused with retry advice."""

    standing: Standing
    limit: int
    inside: set[Flight] = field(default_factory=set)
    _reserved: int = 0

    def __post_init__(self) -> None:
        self._open = _opened()
        self._open_exact = _opened()
        self._left = asyncio.Event()
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def load(self) -> int:
        """Samples inside or on their way in."""
        return self._reserved

    @property
    def busy_s(self) -> float:
        """Seconds so far in which some sample was inside."""
        return self._busy_s + (time.monotonic() - self._busy_since if self.inside else 0.0)

    def reserve(self, samples: int) -> None:
        """Take `samples` places at once, or raise OVERLOADED, DRAINING, FENCED. Give them back with `give_back`."""
        self.standing.check_serving()
        if self._reserved + samples > self.limit:
            raise retryable(
                Reason.OVERLOADED,
                f"{self.standing.worker} holds {self._reserved} of {self.limit} samples, {samples} more do not fit",
                knob="rollout.engine.max_num_seqs",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._reserved += samples

    def give_back(self, samples: int) -> None:
        """Return places that `reserve` took."""
        self._reserved -= samples
        self._left.set()

    async def enter(self, flights: list[Flight], bound: VersionBound) -> None:
        """Wait until the gate is open for `bound`, check it against the weights of that moment, and go in together.

        Raises what `Standing.check_serving` and `check_bound` raise. The caller sets the deadline.
        """
        await self.until_open(bound)
        self.standing.check_serving()
        self.standing.check_bound(bound)
        if not self.inside:
            self._busy_since = time.monotonic()
        self.inside.update(flights)

    async def until_open(self, bound: VersionBound) -> None:
        """Return at a moment when the gate is open for such requests."""
        while True:
            if not self._open.is_set():
                await self._open.wait()
            elif bound.exact is not None and not self._open_exact.is_set():
                await self._open_exact.wait()
            else:
                return

    def leave(self, flight: Flight) -> None:
        """The sample ended. Idempotent."""
        if self.inside == {flight}:
            self._busy_s = self.busy_s
        self.inside.discard(flight)
        self._left.set()

    def close(self, *, exact_only: bool = False) -> None:
        """Let nobody in, or nobody with an exact bound."""
        (self._open_exact if exact_only else self._open).clear()

    def open(self) -> None:
        """Let everybody in again."""
        self._open_exact.set()
        self._open.set()

    async def until_gone(self, timeout_s: float, which: Callable[[Flight], bool] = lambda _: True) -> bool:
        """True once no such flight is inside; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(which(flight) for flight in self.inside):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    def end(self, ending: Ending, which: Callable[[Flight], bool] = lambda _: True) -> list[str]:
        """Mark such flights as ended by us; engine ids to abort. A flight keeps the first reason it was given."""
        chosen = [flight for flight in self.inside if flight.ending is None and which(flight)]
        for flight in chosen:
            flight.ending = ending
        return [flight.engine_id for flight in chosen if flight.engine_id]


def ended_error(ending: Ending, standing: Standing) -> OmnifleetError | None:
    """The failure that a caller sees for an ending; None where it sees a finish reason instead."""
    match ending:
        case Ending.MOVED:
            return OmnifleetError(
                Reason.VERSION_MOVED,
                f"the weights moved on before {standing.worker} finished; the exact bound holds for the tokens so far",
                retryable=True,
                knob="weight_version",
                current_version=standing.version,
            )
        case Ending.FENCED:
            return retryable(
                Reason.FENCED, f"{standing.worker} was fenced during the reply: {standing.fence}"
            )
        case Ending.LEAVING:
            return retryable(Reason.DRAINING, f"{standing.worker} left before the reply was finished")
        case _:
            return None


def _opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
