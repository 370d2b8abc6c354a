"""A place in a pool: one process at a time, and a thread that speaks to it.

The next request is sent while the process works on one, so that it never waits for us. It answers in order: when it
ends, the request at the head is to blame, and the one behind it goes to its successor as if nothing had been.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.arena import ARENA_BYTES, LANES
from omnifleet_media.sandbox.frames import Header
from omnifleet_media.sandbox.process import Late, Lost, Process

log = logging.getLogger("omnifleet.media")

Take = Callable[[Header, memoryview], Any]
"""What a caller makes of an answer, in the station's thread. The bytes are gone afterwards, and until then the process can
change them: copy first, then look."""
Done = Callable[["Station", "Job", Any, BaseException | None], None]
SKIPPED = object()
"""What comes of a job that nobody wants any more, or that another station has taken."""
_TRIES = 2


@dataclass(slots=True, eq=False)
class Job:
    """A request and who waits for its answer. No header: a process is to be started, its facts are the answer.

    station: the last that it was given to.
    """

    header: Header | None
    body: bytes | memoryview
    take: Take
    answer: asyncio.Future[Any]
    losses: int = 0
    station: Station | None = None


class Station:
    """`given` is the pool's: jobs that are here. `head` is what the process works on."""

    def __init__(
        self, role: str, start: Callable[[], Process], work_s: float, time_knob: str, done: Done
    ) -> None:
        """done: called in this station's thread with what came of a job."""
        self._role, self._start, self._work_s, self._time_knob = role, start, work_s, time_knob
        self._done = done
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._again: deque[Job] = deque()
        self._sent: deque[Job] = deque()
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self.process: Process | None = None
        self.given: list[Job] = []
        self.head: Job | None = None
        self.replaced = 0

    def give(self, job: Job) -> None:
        """One more job, from another station if it had one."""
        job.station = self
        self.given.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"media-{self._role}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def kill(self) -> None:
        """End the process; the thread sees it and goes on with another."""
        process = self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and, soon, the thread."""
        self._closing = True
        self._jobs.put(None)
        self.kill()

    def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        if self._thread is not None:
            self._thread.join(self._work_s)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                job = self._next()
                try:
                    if job is not None:
                        self._send(job)
                    elif self._sent:
                        self._answer()
                except (Lost, Late, OSError) as error:
                    self._lose(error)
        finally:
            self._end()

    def _next(self) -> Job | None:
        """The next job to send; None: the answer to one that is sent comes first, or the station is closed."""
        if len(self._sent) == LANES:
            return None
        if not self._again:
            try:
                job = self._jobs.get(block=not self._sent)
            except Empty:
                return None
            if job is None:
                return None
            self._again.append(job)
        if self._sent and len(self._again[0].body) > ARENA_BYTES:
            return None  # it goes through the socket, where the process may be writing an answer now
        return self._again.popleft()

    def _send(self, job: Job) -> None:
        if job.answer.done() or job.station is not self:
            self._done(self, job, SKIPPED, None)
            return
        try:
            process = self.process = self.process or self._start()
        except OmnifleetError as error:
            self._done(self, job, None, error)
            return
        if job.header is None:
            self._done(self, job, process.facts, None)
            return
        self._sent.append(job)
        self.head = self._sent[0]
        self._turn += 1
        process.send((self._turn - 1) % LANES, job.header, job.body)

    def _answer(self) -> None:
        assert self.process is not None
        lane = (self._turn - len(self._sent)) % LANES
        header, body = self.process.receive(lane, time.monotonic() + self._work_s)
        value, error = SKIPPED, _refusal(header)
        job = self._sent.popleft()
        self.head = self._sent[0] if self._sent else None
        if error is None and not job.answer.done():
            try:
                value = job.take(header, body)
            except Exception as raised:  # noqa: BLE001 -- the caller hears it
                error = raised
        self._done(self, job, value, error)

    def _lose(self, error: Exception) -> None:
        head, *others = self._sent
        self._end()
        self.replaced += 1
        self._again.extendleft(reversed(others))
        if head.answer.done():
            self._done(self, head, SKIPPED, None)
            return
        log.warning("a %s process was lost: %r", self._role, error)
        head.losses += 1
        if isinstance(error, Late):
            told = f"one request took longer than {self._work_s:g} s; its process was replaced"
            self._done(self, head, None, OmnifleetError(Reason.LIMIT_EXCEEDED, told, knob=self._time_knob))
        elif head.losses < _TRIES:
            self._again.appendleft(head)
        else:
            told = f"the input ended two {self._role} processes"
            self._done(self, head, None, OmnifleetError(Reason.INVALID_MEDIA, told))

    def _end(self) -> None:
        self._sent.clear()
        self.head, self._turn = None, 0
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.end()


def _refusal(header: Header) -> BaseException | None:
    error = header.get("error")
    if error is None:
        return None
    try:
        return OmnifleetError(Reason(error["reason"]), error["message"], knob=error["knob"])
    except (LookupError, TypeError, ValueError):
        raise Lost("answered an error that has no reason") from None
