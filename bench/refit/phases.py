"""When calls began and ended, on the clock that all processes of a host share, to see where the time of a refit goes."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any


class Phases:
    """Of the methods that are watched."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, float, float]] = []

    def watch(self, owner: Any, *names: str) -> None:
        """Note every call of these methods of a class or an object from now on."""
        for name in names:
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def taken(self) -> list[tuple[str, float, float]]:
        """(name, began, ended) of each call since the last look, monotonic s."""
        calls, self._calls = self._calls, []
        return calls

    def _watched(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        async def later(*args: Any, **fields: Any) -> Any:
            began = time.monotonic()
            try:
                return await method(*args, **fields)
            finally:
                self._calls.append((name, began, time.monotonic()))

        @functools.wraps(method)
        def now(*args: Any, **fields: Any) -> Any:
            began = time.monotonic()
            try:
                return method(*args, **fields)
            finally:
                self._calls.append((name, began, time.monotonic()))

        return later if inspect.iscoroutinefunction(method) else now


def timeline(calls: list[tuple[str, float, float]], since: float) -> str:
    """Each call as "name from-to", ms since a moment."""
    return ", ".join(f"{name} {1e3 * (a - since):.1f}-{1e3 * (b - since):.1f}" for name, a, b in calls)
