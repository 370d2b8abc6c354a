"""Scorer processes behind one bounded queue. A stuck or dead one is replaced by a spare; its item gets what it deserves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet_reward import frames
from omnifleet_reward.child import Child, Judged, Needs
from omnifleet_reward.scorer import Verdict

log = logging.getLogger("omnifleet.reward")

_RETRY_MS = (100, 30_000)
_AHEAD_S = 0.01
_AHEAD_ITEMS = 32
"""Quick items are sent to a process ahead of its answers: this much work, and as many, at most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the items of one batch have in common.

    terms: JSON for the process. beyond: as in `Scorer`, by term; those with a number stand last. needs: to be prepared first.
    """

    terms: str
    beyond: tuple[float | None, ...]
    needs: tuple[Needs, ...] = ()


@dataclass(slots=True)
class _Job:
    frame: bytes
    plan: Plan
    timeout_s: float
    result: asyncio.Future[list[Verdict]]

    def settle(self, judged: Judged) -> None:
        """Tell who waits, if anybody still does."""
        if self.result.done():
            return
        if isinstance(judged, OmnifleetError):
            self.result.set_exception(judged)
        else:
            self.result.set_result(judged)


class Pool:
    """`config.processes` scorer processes: up on entry of `async with`, gone on exit."""

    def __init__(self, config: RewardConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting = 0
        self._busy = 0
        self._seconds_per_item = 0.001
        self._spares = _Spares(config, counters)
        self._tasks: list[asyncio.Task[None]] = []
        counters.gauge("items_waiting", lambda: self._waiting)
        counters.gauge("processes_busy", lambda: self._busy)

    async def __aenter__(self) -> Pool:
        children: list[Child] = []
        try:
            for _ in range(self._config.processes):
                children.append(await self._spares.start())
        except BaseException:
            for child in children:
                await child.stop()
            raise
        self._tasks = [asyncio.create_task(self._serve(child)) for child in children]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._queue.empty():
            job = self._queue.get_nowait()
            if not job.result.done():
                job.result.set_exception(_stopping())
        await self._spares.close()

    @property
    def alive(self) -> bool:
        """True if every process is served."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def judge(
        self, replies: Sequence[dict[str, Any]], plan: Plan, timeout_s: float
    ) -> list[list[Verdict] | OmnifleetError]:
        """Verdicts or an error for each reply, in order; `timeout_s` bounds each item alone.

        Raises OVERLOADED if the queue cannot take them now, LIMIT_EXCEEDED if it never could.
        """
        encoded = [_frame(reply, plan) for reply in replies]
        self._admit(sum(isinstance(frame, bytes) for frame in encoded))
        if plan.needs:
            self._spares.keep(plan.needs)
        loop = asyncio.get_running_loop()
        jobs = []
        for frame in encoded:
            job = _Job(b"", plan, timeout_s, loop.create_future())
            jobs.append(job)
            if isinstance(frame, bytes):
                job.frame = frame
                self._queue.put_nowait(job)
            else:
                job.settle(frame)
        results = await asyncio.gather(*(job.result for job in jobs), return_exceptions=True)
        return [_settled(result) for result in results]

    def _admit(self, items: int) -> None:
        limit = self._config.queue_items
        if items > limit:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"{items} items in one call, the queue holds {limit}",
                knob="reward_service.queue_items",
            )
        if self._waiting + items > limit:
            raise retryable(
                Reason.OVERLOADED,
                f"{self._waiting} items wait, {items} more would pass the limit of {limit}",
                knob="reward_service.queue_items",
                retry_after_ms=self._retry_after_ms(),
            )
        self._waiting += items

    def _retry_after_ms(self) -> int:
        """Half of the time that the queue takes to empty at the present pace."""
        estimate = 500 * self._waiting * self._seconds_per_item / self._config.processes
        return int(min(max(estimate, _RETRY_MS[0]), _RETRY_MS[1]))

    async def _serve(self, first: Child) -> None:
        """Judge the queue's items with one process, and with those that take its place."""
        child: Child | None = first
        jobs: deque[_Job] = deque()
        try:
            while True:
                if not jobs:
                    await self._take(jobs)
                if jobs[0].result.done():  # the caller went away
                    jobs.popleft()
                    continue
                self._busy += 1
                try:
                    if child is None or not child.alive:
                        child = await self._replacement(child)
                    await child.prepare(jobs[0].plan.needs)
                    await self._judge(jobs, child)
                except OmnifleetError as error:  # no process, or none that can be prepared
                    jobs.popleft().settle(error)
                finally:
                    self._busy -= 1
        finally:  # cancelled: the pool closes
            for job in jobs:
                job.settle(_stopping())
            if child is not None:
                await child.stop()

    async def _take(self, jobs: deque[_Job]) -> None:
        """The next job, and those behind it that can be sent ahead without keeping other processes idle."""
        jobs.append(await self._queue.get())
        self._waiting -= 1
        share = self._queue.qsize() // self._config.processes
        for _ in range(min(_AHEAD_ITEMS - 1, int(_AHEAD_S / self._seconds_per_item), share)):
            jobs.append(self._queue.get_nowait())
            self._waiting -= 1

    async def _judge(self, jobs: deque[_Job], child: Child) -> None:
        """The first jobs of one plan; those that a dying process did not begin stay."""
        plan, timeout_s = jobs[0].plan, jobs[0].timeout_s
        alike = list(takewhile(lambda job: job.plan is plan and job.timeout_s == timeout_s, jobs))
        started = time.monotonic()
        async with aclosing(child.judge([job.frame for job in alike], timeout_s, plan.beyond)) as answers:
            async for judged in answers:
                jobs.popleft().settle(judged)
                now = time.monotonic()
                self._seconds_per_item += 0.1 * (now - started - self._seconds_per_item)
                started = now
        if not child.alive:
            self._spares.keep(())

    async def _replacement(self, dead: Child | None) -> Child:
        if dead is not None:
            await dead.stop()
        self._counters.add("processes_replaced")
        return await self._spares.take()


class _Spares:
    """A process that is ready before it is needed, so that a replacement costs the next item nothing."""

    def __init__(self, config: RewardConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._needs: dict[Needs, None] = {}
        self._next: asyncio.Task[Child] | None = None

    def keep(self, needs: Sequence[Needs]) -> None:
        """From now on have a spare, with these scorers prepared."""
        self._needs.update(dict.fromkeys(needs))
        if self._next is None:
            self._next = asyncio.create_task(self.start())

    async def start(self) -> Child:
        """A new process. Raises INTERNAL."""
        child = await Child.start(self._config)
        self._counters.add("processes_started")
        try:
            await child.prepare(list(self._needs))
        except BaseException:
            await child.stop()
            raise
        return child

    async def take(self) -> Child:
        """The spare, or a new process; the next spare is begun. Raises INTERNAL."""
        task, self._next = self._next, None
        child: Child | None = None
        if task is not None:
            try:
                child = await task
            except OmnifleetError as error:
                log.error("%s", error.message)
        if child is not None and not child.alive:
            await child.stop()
            child = None
        if child is None:
            child = await self.start()
        self.keep(())
        return child

    async def close(self) -> None:
        """Stop the spare."""
        task, self._next = self._next, None
        if task is None:
            return
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OmnifleetError):
            await (await task).stop()


def _frame(reply: dict[str, Any], plan: Plan) -> bytes | OmnifleetError:
    try:
        return frames.encode({"reply": reply, "terms": plan.terms})
    except ValueError as error:
        return invalid(f"a reply cannot be sent to a scorer process: {error}")


def _stopping() -> OmnifleetError:
    return retryable(Reason.UNAVAILABLE, "the reward service is stopping")


def _settled(result: list[Verdict] | BaseException) -> list[Verdict] | OmnifleetError:
    if isinstance(result, BaseException) and not isinstance(result, OmnifleetError):
        raise result
    return result
