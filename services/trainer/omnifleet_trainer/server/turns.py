"""Turns on shared devices: every worker of the pool sleeps while the policy trains; see `omnifleet_trainer.loop.turns`.

Whoever dies in a turn does not hold the others: a worker that is gone is left out, and a trainer that starts again puts
all engines to sleep first, whatever its last life left them in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.turns import TurnsClient
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WorkerState
from omnifleet_trainer.loop.weights import Weights

log = logging.getLogger("omnifleet.trainer.turns")

_PAUSE_S = 0.25
_ASK_S = 5.0
_LAST_S = 10.0
"""How long the end of a run waits for the engines to wake."""
_NO_ENGINE = (WorkerState.JOINING, WorkerState.DEAD, WorkerState.RETIRED)
_DEEPEST = 2
Step = Callable[[TurnsClient, float], Awaitable[object]]
"""What is asked of a worker, within some seconds."""


class Sending(Protocol):
    """What turns tell the sender of refits; `omnifleet_trainer.refit.RefitSender` is told."""

    def rest(self) -> None:
        """The workers sleep: bring nobody up."""
        ...

    def go_on(self, bare: Collection[str]) -> None:
        """Their weights have memory again; `bare`: workers that have none and need everything."""
        ...


class SharedDevices:
    """Implements `Turns`, which says what each method does. Open with `SharedDevices.open`, `begin`, then `give` the policy."""

    def __init__(
        self,
        fleet: FleetClient,
        secret: str,
        sender: Sending,
        counters: Counters,
        *,
        level: int,
        timeout_s: float,
        pool: str,
    ) -> None:
        """level: of the engines' sleep. timeout_s: of one change of hands."""
        self._fleet, self._secret, self._sender, self._counters = fleet, secret, sender, counters
        self._level, self._timeout_s, self._pool = level, timeout_s, pool
        self._workers: dict[str, WorkerView] = {}
        self._asleep: dict[str, WorkerView] = {}
        self._weights: Weights | None = None
        self._policy_here = False

    @staticmethod
    @asynccontextmanager
    async def open(
        gateway: str,
        secret: str,
        sender: Sending,
        counters: Counters,
        *,
        level: int,
        timeout_s: float,
        pool: str,
    ) -> AsyncIterator[SharedDevices]:
        """Connect to the registry. On exit the engines that still sleep are woken."""
        async with FleetClient.open(gateway, secret) as fleet:
            turns = SharedDevices(
                fleet, secret, sender, counters, level=level, timeout_s=timeout_s, pool=pool
            )
            try:
                yield turns
            finally:
                await turns._leave()

    async def begin(self, workers: int, *, timeout_s: float) -> None:
        """Wait until `workers` engines are up (they need the device to start), then have them sleep.

        After `timeout_s` fewer suffice. Raises DEADLINE if there is none.
        """
        end = time.monotonic() + timeout_s
        while len(await self._up(end)) < workers:
            if time.monotonic() >= end:
                if not self._workers:
                    raise self._late(f"no engine was up within {timeout_s:g} s", "trainer.step_timeout_s")
                log.warning("%d of %d engines are up: going on", len(self._workers), workers)
                break
            await asyncio.sleep(_PAUSE_S)
        await self._sleep()

    def give(self, weights: Weights) -> None:
        """The policy was opened, on its device."""
        self._weights, self._policy_here = weights, True

    async def train(self) -> dict[str, float]:
        """See `Turns`."""
        began = time.monotonic()
        running = await self._sleep()
        asleep = time.monotonic()
        await self._move(here=True)
        ended = time.monotonic()
        return {
            "turn/sleep_s": asleep - began,
            "turn/onload_s": ended - asleep,
            "turn/in_flight": float(running),
        }

    async def refit(self) -> dict[str, float]:
        """See `Turns`."""
        began = time.monotonic()
        await self._move(here=False)
        left = time.monotonic()
        await self._wake(weights_only=True)
        self._sender.go_on(self._asleep if self._level == _DEEPEST else ())
        return {"turn/offload_s": left - began, "turn/wake_weights_s": time.monotonic() - left}

    async def generate(self) -> dict[str, float]:
        """See `Turns`."""
        await self._move(here=False)
        began = time.monotonic()
        await self._wake(weights_only=False)
        self._sender.go_on(())
        return {"turn/wake_s": time.monotonic() - began}

    # ------------------------------------------------------------------ the policy

    async def _move(self, *, here: bool) -> None:
        if self._weights is None or self._policy_here == here:
            return
        policy = self._weights.policy
        moving = self._weights.on_thread(policy.onload if here else policy.offload)
        try:
            async with asyncio.timeout(self._timeout_s):
                await moving
        except TimeoutError:
            what = "come to" if here else "leave"
            raise self._late(f"the policy did not {what} its device within {self._timeout_s:g} s") from None
        self._policy_here = here

    # ------------------------------------------------------------------ the engines

    async def _sleep(self) -> int:
        """All engines that are up sleep; how many samples were running."""
        end = time.monotonic() + self._timeout_s
        self._sender.rest()
        running = [0]

        async def sleep(client: TurnsClient, left_s: float) -> None:
            running.append(await client.sleep(self._level, deadline_s=left_s))

        found = self._asleep = await self._up(end)
        there = await self._ask_all(found, sleep, end)
        self._asleep = {id: found[id] for id, refused in there.items() if refused is None}
        awake = {id: error for id, error in there.items() if isinstance(error, OmnifleetError)}
        if awake:
            worker, error = next(iter(awake.items()))
            raise self._late(f"{worker} keeps the device that the policy needs: {error.message}") from error
        return sum(running)

    async def _wake(self, *, weights_only: bool) -> None:
        """All that sleep wake. One that does not is left to whoever watches it: it serves nothing."""
        end = time.monotonic() + self._timeout_s

        async def wake(client: TurnsClient, left_s: float) -> None:
            await client.wake(weights_only=weights_only, deadline_s=left_s)

        there = await self._ask_all(self._asleep, wake, end)
        for worker, error in there.items():
            if isinstance(error, OmnifleetError):
                log.error("%s does not wake: %s", worker, error)
                self._counters.add("turns_not_woken")
        if weights_only:
            self._asleep = {id: view for id, view in self._asleep.items() if there[id] is None}
        else:
            self._asleep = {}

    async def _ask_all(
        self, workers: dict[str, WorkerView], step: Step, end: float
    ) -> dict[str, OmnifleetError | str | None]:
        """Ask each until it did, is gone (a word for it), or the time is up (its last error)."""
        ids = list(workers)
        results = await asyncio.gather(*(self._ask(workers[id], step, end) for id in ids))
        return dict(zip(ids, results, strict=True))

    async def _ask(self, worker: WorkerView, step: Step, end: float) -> OmnifleetError | str | None:
        while True:
            try:
                async with TurnsClient.open(worker.grpc_address, self._secret) as client:
                    await step(client, max(end - time.monotonic(), 0.1))
                return None
            except OmnifleetError as error:
                if await self._is_gone(worker.id):
                    log.warning("%s is gone: %s", worker.id, error)
                    return "gone"
                if not error.retryable or time.monotonic() + _PAUSE_S >= end:
                    return error
            await asyncio.sleep(_PAUSE_S)

    async def _is_gone(self, worker: str) -> bool:
        try:
            view = await self._fleet.list(self._pool, deadline_s=_ASK_S)
        except OmnifleetError:
            return False  # the registry is away: nobody knows
        states = {found.id: found.state for found in view.workers}
        return states.get(worker, WorkerState.RETIRED) in _NO_ENGINE

    async def _up(self, end: float) -> dict[str, WorkerView]:
        """Workers whose engine is up. While the registry is away: those that were last time."""
        while True:
            try:
                view = await self._fleet.list(self._pool, deadline_s=_ASK_S)
            except OmnifleetError as error:
                if self._workers:
                    log.warning("the registry is away, the workers of before are asked: %s", error)
                    return self._workers
                if not error.retryable or time.monotonic() + _PAUSE_S >= end:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            self._workers = {w.id: w for w in view.workers if w.state not in _NO_ENGINE}
            return self._workers

    async def _leave(self) -> None:
        """The trainer goes, its memory with it: who sleeps wakes."""
        self._timeout_s = min(self._timeout_s, _LAST_S)
        if self._asleep:
            await self._wake(weights_only=False)

    def _late(self, message: str, knob: str = "trainer.turn_timeout_s") -> OmnifleetError:
        return retryable(Reason.DEADLINE, message, knob=knob)
