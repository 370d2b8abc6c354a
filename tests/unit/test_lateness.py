"""A loop that is held up is seen, whatever its tasks wait for at that moment."""

from __future__ import annotations

import asyncio
import time

from omnifleet.telemetry.lateness import watch_lateness


async def test_the_time_in_which_the_loop_was_held_up_is_told_once() -> None:
    told: list[float] = []
    seen = asyncio.Event()

    def note(late_s: float) -> None:
        told.append(late_s)
        if len(told) > 1:
            seen.set()

    watch = asyncio.create_task(watch_lateness(note, tick_s=0.01))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 -- the fault that is watched for
    await asyncio.wait_for(seen.wait(), 10)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert told[0] >= 0.49 - 0.01 and min(told) >= 0 and sum(told) < 5
