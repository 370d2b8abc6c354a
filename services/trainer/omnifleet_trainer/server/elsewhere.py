"""Numbers of other services for each step's record; absent while their service is away."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from omnifleet.client.fleet import FleetView
from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError

log = logging.getLogger("omnifleet.trainer")
_DEADLINE_S = 5.0


class Fleet(Protocol):
    """What is asked of the registry."""

    async def list(self, pool: str = "", *, include_gone: bool = False, deadline_s: float = ...) -> FleetView:
        """Workers of one pool, or of all ("")."""
        ...


class MediaCounters:
    """Counters of the media service, for the proof that a picture is decoded once."""

    def __init__(self, media: MediaClient) -> None:
        self._media = media

    async def read(self) -> dict[str, float]:
        """Counters now."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return (await self._media.status()).counters
        except (OmnifleetError, TimeoutError) as error:
            log.warning("no counters of the media service: %s", error)
            return {}


class EngineIdleness:
    """Which share of the time since the last look the engines had nothing to do."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet, self._pool = fleet, pool
        self._last: dict[str, tuple[float, float]] = {}

    async def read(self) -> dict[str, float]:
        """`engine_idle_share`, 0..1, over all workers of the pool; nothing until one has reported twice.

        Each worker's own two reports are compared, so it does not matter how old they are.
        """
        try:
            view = await self._fleet.list(self._pool, deadline_s=_DEADLINE_S)
        except OmnifleetError as error:
            log.warning("no counters of the workers: %s", error)
            return {}
        now = {
            worker.id: (worker.heartbeat_unix_ms / 1000, worker.counters["busy_seconds"])
            for worker in view.workers
            if "busy_seconds" in worker.counters
        }
        known = [(self._last[worker], report) for worker, report in now.items() if worker in self._last]
        passed = sum(after[0] - before[0] for before, after in known)
        busy = sum(after[1] - before[1] for before, after in known)
        self._last = now
        return {"engine_idle_share": min(1.0, max(0.0, 1 - busy / passed))} if passed > 0 else {}
