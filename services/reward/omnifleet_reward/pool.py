"""Scorer processes, one item at a time each. A stuck or dead one is replaced; its item gets an error, never a score."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet_reward import frames
from omnifleet_reward.process import READY
from omnifleet_reward.scorer import Verdict

log = logging.getLogger("omnifleet.reward")

_START_S = 60.0
_RETRY_MS = (100, 30_000)


@dataclass(slots=True)
class _Job:
    request: dict[str, Any]
    timeout_s: float
    result: asyncio.Future[list[Verdict]]


class Pool:
    """`config.processes` scorer processes behind one bounded queue: up on entry of `async with`, gone on exit."""

    def __init__(self, config: RewardConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting = 0
        self._busy = 0
        self._seconds_per_item = 0.001
        self._processes = [_Process(config, counters) for _ in range(config.processes)]
        self._tasks: list[asyncio.Task[None]] = []
        counters.gauge("items_waiting", lambda: self._waiting)
        counters.gauge("processes_busy", lambda: self._busy)

    async def __aenter__(self) -> Pool:
        try:
            for process in self._processes:
                await process.start()
        except OmnifleetError:
            await self._close()
            raise
        self._tasks = [asyncio.create_task(self._serve(process)) for process in self._processes]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def alive(self) -> bool:
        """True if every process is served."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def judge(
        self, requests: Sequence[dict[str, Any]], timeout_s: float
    ) -> list[list[Verdict] | OmnifleetError]:
        """Verdicts or an error for each request ({"reply", "terms"}), in order; `timeout_s` bounds each item alone.

        Raises OVERLOADED if the queue cannot take them now, LIMIT_EXCEEDED if it never could.
        """
        self._admit(len(requests))
        loop = asyncio.get_running_loop()
        jobs = [_Job(request, timeout_s, loop.create_future()) for request in requests]
        for job in jobs:
            self._queue.put_nowait(job)
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

    async def _serve(self, process: _Process) -> None:
        while True:
            job = await self._queue.get()
            self._waiting -= 1
            if job.result.done():  # the caller went away
                continue
            self._busy += 1
            started = time.monotonic()
            try:
                verdicts = await process.judge(job.request, job.timeout_s)
            except OmnifleetError as error:
                if not job.result.done():
                    job.result.set_exception(error)
            else:
                if not job.result.done():
                    job.result.set_result(verdicts)
            finally:
                self._busy -= 1
                if not job.result.done():  # cancelled: the pool closes
                    job.result.set_exception(_stopping())
                self._seconds_per_item += 0.1 * (time.monotonic() - started - self._seconds_per_item)
            try:
                await process.revive()
            except OmnifleetError as error:  # the next item tries again, and says so if it fails
                log.error("%s", error.message)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._queue.empty():
            job = self._queue.get_nowait()
            if not job.result.done():
                job.result.set_exception(_stopping())
        for process in self._processes:
            await process.stop()


def _stopping() -> OmnifleetError:
    return retryable(Reason.UNAVAILABLE, "the reward service is stopping")


def _settled(result: list[Verdict] | BaseException) -> list[Verdict] | OmnifleetError:
    if isinstance(result, BaseException) and not isinstance(result, OmnifleetError):
        raise result
    return result


class _Process:
    """A child that is started when needed and killed, with all that it started, when it fails."""

    def __init__(self, config: RewardConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the child and wait until it is ready. Raises INTERNAL."""
        command = [sys.executable, "-m", "omnifleet_reward.process", "--parent", str(os.getpid())]
        command += ["--memory-bytes", str(self._config.item_memory_bytes)]
        for module in self._config.modules:
            command += ["--module", module]
        # What the service can import, its scorer processes can.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipe = asyncio.subprocess.PIPE
        try:
            self._child = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
            )
            self._counters.add("processes_started")
            ready = await asyncio.wait_for(self._read(), _START_S)
        except (TimeoutError, OSError, ValueError, EOFError) as error:
            await self.stop()
            raise OmnifleetError(
                Reason.INTERNAL, f"a scorer process did not start: {type(error).__name__}"
            ) from error
        if ready != READY:
            await self.stop()
            raise OmnifleetError(Reason.INTERNAL, "a scorer process did not start: it spoke out of turn")

    async def revive(self) -> None:
        """Start the child if it is gone. Raises INTERNAL."""
        if self._child is None or self._child.returncode is not None:
            await self.stop()
            await self.start()

    async def judge(self, request: dict[str, Any], timeout_s: float) -> list[Verdict]:
        """One item. Raises the item's error: DEADLINE, INTERNAL (crash or a raising scorer) or LIMIT_EXCEEDED."""
        await self.revive()
        try:
            answer = await asyncio.wait_for(self._exchange(request), timeout_s)
        except TimeoutError:
            await self.stop()
            raise retryable(
                Reason.DEADLINE,
                f"scoring took longer than {timeout_s:g} s",
                knob="reward_service.item_timeout_s",
            ) from None
        except (OSError, ValueError, EOFError) as error:
            code = await self.stop()
            raise OmnifleetError(
                Reason.INTERNAL, f"the scorer ended its process ({_ending(code)})"
            ) from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        if answer.get("spent"):
            await self.stop()
        if "error" in answer:
            told = answer["error"]
            raise OmnifleetError(Reason(told["reason"]), told["message"], knob=told["knob"])
        return [Verdict(score, correct) for score, correct in answer["verdicts"]]

    async def stop(self) -> int | None:
        """Kill the child's process group and reap the child; its exit code, None if there was none."""
        child, self._child = self._child, None
        if child is None:
            return None
        if child.returncode is None:
            # A child that is about to end by itself has an exit code worth telling.
            with contextlib.suppress(TimeoutError):
                if child.stdout is not None and child.stdout.at_eof():
                    await asyncio.wait_for(child.wait(), 0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return await child.wait()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(frames.encode(request))
        await self._child.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._child is not None and self._child.stdout is not None
        answer: dict[str, Any] = await frames.read(self._child.stdout)
        return answer


def _ending(code: int | None) -> str:
    if code is None:
        return "unknown"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
