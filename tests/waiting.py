"""Waiting in tests: for what no event tells, and beside work that ends with the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll a state that is spread over objects, tasks or processes. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Inside, `work` runs; it is cancelled at the end, and what it raises is dropped."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
