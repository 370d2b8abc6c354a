"""Single-flight: callers that want the same thing at the same time share one making of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """One running `make` a key. A caller that is cancelled leaves the making to the others."""

    def __init__(self) -> None:
        self._running: dict[Key, asyncio.Task[Value]] = {}

    async def do(self, key: Key, make: Callable[[], Awaitable[Value]]) -> Value:
        """The value of the running `make` for `key`, or of a new one. Raises what `make` raises, in every caller."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(_run(make))
            self._running[key] = task
            task.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(task)

    def running(self, key: Key) -> bool:
        """True if `do` would join somebody else's making."""
        return key in self._running

    async def close(self) -> None:
        """Cancel what is still running and wait for it."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _landed(self, key: Key, task: asyncio.Task[Value]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen, even when every caller has gone


async def _run(make: Callable[[], Awaitable[Value]]) -> Value:
    return await make()
