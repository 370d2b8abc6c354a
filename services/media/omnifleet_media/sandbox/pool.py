"""A pool of processes of one role: a time limit for each request, replacement of what is stuck or dead."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from omnifleet.errors import Reason, retryable
from omnifleet_media.sandbox.frames import Header
from omnifleet_media.sandbox.process import Process
from omnifleet_media.sandbox.station import SKIPPED, Job, Station, Take

_WAITING = 256
_AHEAD = (
    3  # jobs of a station: one at work, one sent, and one for when the answer of the first is being taken
)


def copied(header: Header, body: memoryview) -> tuple[Header, memoryview]:
    """An answer out of the reach of the process that gave it."""
    own = np.empty(len(body), np.uint8).data  # not filled with zeros first
    own[:] = body
    return header, own


class ProcessPool:
    """`size` processes of `role` (see sandbox.child.ROLES), started when first needed.

    work_s: longest answer to one request. memory_bytes: address space that a process may add after its imports.
    reply_bytes: largest answer that is received. knobs name the settings for errors.
    """

    def __init__(
        self, role: str, size: int, *, work_s: float, memory_bytes: int, reply_bytes: int, time_knob: str
    ) -> None:
        self._role = role

        def start() -> Process:
            return Process(role, memory_bytes, reply_bytes, work_s)

        self._stations = [Station(role, start, work_s, time_knob, self._finished) for _ in range(size)]
        self._waiting: deque[Job] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def busy(self) -> int:
        """Processes with a request."""
        return sum(station.head is not None for station in self._stations)

    @property
    def replaced(self) -> int:
        """Processes that were lost or ended for a request."""
        return sum(station.replaced for station in self._stations)

    async def warm(self) -> Header:
        """Start one process ahead of the first request; answers its facts."""
        facts: Header = await self._answer(Job(None, b"", copied, self._future()))
        return facts

    async def call(self, header: Header, body: bytes | memoryview = b"", take: Take = copied) -> Any:
        """What `take` makes of the answer to one request: unless another is given, the header and a copy of the body.

        Raises what the role names, LIMIT_EXCEEDED past the time limit, INVALID_MEDIA if the input ends the process
        twice, OVERLOADED if too many wait, and what `take` raises.
        """
        if len(self._waiting) >= _WAITING:
            raise retryable(
                Reason.OVERLOADED,
                f"{len(self._waiting)} requests wait for {self._role} processes",
                knob="media.decoders",
                retry_after_ms=200,
            )
        return await self._answer(Job(header, body, take, self._future()))

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for job in {*self._waiting, *(job for station in self._stations for job in station.given)}:
            if not job.answer.done():
                job.answer.set_exception(retryable(Reason.DRAINING, "the media service is closing"))
        for station in self._stations:
            station.close()
        for station in self._stations:
            await asyncio.to_thread(station.join)

    def _future(self) -> asyncio.Future[Any]:
        self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    async def _answer(self, job: Job) -> Any:
        if self._closed:
            raise retryable(Reason.DRAINING, "the media service is closing")
        self._waiting.append(job)
        self._hand_out()
        try:
            return await job.answer
        except asyncio.CancelledError:
            for station in self._stations:
                if station.head is job:  # nobody wants what it works on, for who knows how long
                    station.kill()
            raise

    def _hand_out(self) -> None:
        """Waiting jobs to stations with room; a station that has nothing to do takes one that another has not begun."""
        while self._waiting:
            station = self._station()
            if station is None:
                return
            job = self._waiting.popleft()
            if not job.answer.done():
                station.give(job)
        for station in self._stations:
            if not station.given and (job_of_another := self._not_begun()):
                station.give(job_of_another)

    def _station(self) -> Station | None:
        """One that is idle, if possible with a process; else the one with the least to do, if it has room."""
        idle = [station for station in self._stations if not station.given]
        if idle:
            return next((station for station in idle if station.process is not None), idle[0])
        least = min(self._stations, key=lambda station: len(station.given))
        return least if len(least.given) < _AHEAD else None

    def _not_begun(self) -> Job | None:
        shared = [job for station in self._stations for job in station.given]
        for station in self._stations:
            for job in station.given[1:]:
                if job is not station.head and not job.answer.done() and shared.count(job) == 1:
                    return job
        return None

    def _finished(self, station: Station, job: Job, value: Any, error: BaseException | None) -> None:
        """Called in the station's thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._land, station, job, value, error)

    def _land(self, station: Station, job: Job, value: Any, error: BaseException | None) -> None:
        station.given.remove(job)
        if error is not None and not job.answer.done():
            job.answer.set_exception(error)
        elif value is not SKIPPED and not job.answer.done():
            job.answer.set_result(value)
        if not self._closed:
            self._hand_out()
