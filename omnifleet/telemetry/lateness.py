"""How late an event loop runs: what holds it up holds up every call and heartbeat that it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.1


async def watch_lateness(note: Callable[[float], None], *, tick_s: float = _TICK_S) -> None:
    """Tick for ever, beside whatever the loop does, and tell `note` how many seconds late each tick was.

    A clock of its own, since a task that also waits for calls is late only when it happens to sleep.
    """
    while True:
        began = time.monotonic()
        await asyncio.sleep(tick_s)
        note(max(0.0, time.monotonic() - began - tick_s))
