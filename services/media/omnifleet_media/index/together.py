"""Steps that wait for the database's thread go to it together: one hop and one transaction for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Step = Callable[[Any], Any]
Outcome = tuple[Any] | Exception
"""What a step answered, or why not."""

_MOST = 64
_Waiting = tuple[Step, bool, "asyncio.Future[Any]"]


class Together:
    """In order of asking; neighbours of one kind (reading, writing) share a run. One event loop."""

    def __init__(
        self, thread: ThreadPoolExecutor, run: Callable[[Sequence[Step], bool], list[Outcome]]
    ) -> None:
        """run: called in `thread` with steps and whether they write; answers an outcome for each."""
        self._thread, self._run = thread, run
        self._waiting: deque[_Waiting] = deque()
        self._running = False

    async def do(self, step: Callable[..., Answer], *, writes: bool) -> Answer:
        """What the step answers once its transaction is committed. Raises what it raised, or what the transaction did."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((step, writes, answer))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._go)  # after those who are about to ask
        return await answer

    def _go(self) -> None:
        kind = self._waiting[0][1]
        steps = list(takewhile(lambda waiting: waiting[1] == kind, list(self._waiting)[:_MOST]))
        for _ in steps:
            self._waiting.popleft()
        run = asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, [step for step, _, _ in steps], kind
        )
        run.add_done_callback(lambda done: self._land(steps, done))

    def _land(self, steps: list[_Waiting], done: asyncio.Future[list[Outcome]]) -> None:
        failed = None if done.cancelled() else done.exception()
        for number, (_, _, answer) in enumerate(steps):
            if answer.done():
                continue
            if done.cancelled():
                answer.cancel()
                continue
            outcome = failed or done.result()[number]
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome[0])
        self._running = bool(self._waiting)
        if self._running:
            self._go()
