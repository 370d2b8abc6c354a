"""Carries the journal's records to sinks, beside the loop. A sink that fails loses its metrics, never the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.counters import Counters
from omnifleet_trainer.loop.journal import Journal, StepRecord
from omnifleet_trainer.sinks.port import Sink

log = logging.getLogger("omnifleet.trainer.sinks")

_CALL_S = 60.0
_LAST_S = 10.0


@asynccontextmanager
async def feeding(
    journal: Journal, sinks: Sequence[Sink], *, after: int, pictures: Path, counters: Counters
) -> AsyncIterator[None]:
    """Inside, records of steps after `after` go to every sink, with `pictures/step-N.png` where there is one.

    On exit the journal is closed and what is left is written, within 10 s; then the sinks are closed.
    """
    feeder = _Feeder(sinks, pictures, counters)
    task = asyncio.create_task(feeder.run(journal, after), name="sinks")
    try:
        yield
    finally:
        journal.close()
        await asyncio.wait((task,), timeout=_LAST_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for sink in sinks:
            await feeder.call(sink, sink.close)


class _Feeder:
    def __init__(self, sinks: Sequence[Sink], pictures: Path, counters: Counters) -> None:
        self._sinks = sinks
        self._pictures = pictures
        self._counters = counters

    async def run(self, journal: Journal, after: int) -> None:
        """Until the journal is closed; its last record may have been completed after it was first seen."""
        sent: StepRecord | None = None
        async with aclosing(journal.follow(after, live=True)) as records:
            async for record in records:
                await self._send(record)
                sent = record
        last = journal.last
        if sent is not None and last is not None and last.step == sent.step and last != sent:
            await self._send(last)

    async def _send(self, record: StepRecord) -> None:
        picture = self._pictures / f"step-{record.step}.png"
        for sink in self._sinks:
            await self.call(sink, lambda sink=sink: sink.write(record))  # type: ignore[misc]
            if picture.exists():
                await self.call(sink, lambda sink=sink: sink.picture(record.step, picture))  # type: ignore[misc]

    async def call(self, sink: Sink, act: Callable[[], None]) -> None:
        """One call in a thread; what goes wrong is counted and logged."""
        try:
            async with asyncio.timeout(_CALL_S):
                await asyncio.to_thread(act)
        except (OmnifleetError, OSError, TimeoutError) as error:
            self._counters.add("sink_errors")
            log.warning("%s: %s", sink.name, error or "no answer in time")
