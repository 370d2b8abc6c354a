"""Waiting for a change without losing it: one thread, no polling, no flag that is read before it is waited on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class Pulse:
    """Something changed, look again. `fire` wakes everyone who waits now."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        """Wake all waiters; each looks at its own predicate again."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, predicate: Callable[[], Value], *, timeout: float | None = None) -> Value:
        """The first true value of `predicate`, asked now and after every pulse. Raises TimeoutError after `timeout` s.

        Between asking and waiting no other task runs, so no pulse can fall into the gap.
        """
        async with asyncio.timeout(timeout):
            while not (value := predicate()):
                await self._next.wait()
        return value
