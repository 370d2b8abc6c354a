"""The fleet as it is seen, over and over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from omnifleet.client.fleet import FleetClient, FleetView

_SILENCE_S = 30.0
"""A registry speaks at least every 10 s; after this long without a word the watch has ended."""


async def sightings(fleet: FleetClient, pool: str, wake: asyncio.Event) -> AsyncGenerator[FleetView, None]:
    """Each snapshot that the registry sends, and the newest one again whenever `wake` is set (it is cleared).

    Ends when the registry does, or falls silent. Raises OmnifleetError.
    """
    view: FleetView | None = None
    async with aclosing(fleet.watch(pool)) as watch:
        coming = asyncio.ensure_future(anext(watch))
        woken = asyncio.ensure_future(wake.wait())
        try:
            while True:
                done, _ = await asyncio.wait(
                    (coming, woken), timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return
                if woken in done:
                    wake.clear()
                    woken = asyncio.ensure_future(wake.wait())
                if coming in done:
                    try:
                        view = coming.result()
                    except StopAsyncIteration:
                        return
                    coming = asyncio.ensure_future(anext(watch))
                if view is not None:
                    yield view
        finally:
            coming.cancel()
            woken.cancel()
            await asyncio.gather(coming, woken, return_exceptions=True)
