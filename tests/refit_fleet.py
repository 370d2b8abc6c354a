"""A registry of workers and a sender that reaches them by a group, for tests of refits over groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from omnifleet_trainer.refit.broadcast import BroadcastSender
from tests.refit_registry import Registry
from tests.refit_world import CPU, Receiving


@asynccontextmanager
async def broadcasting(workers: Sequence[Receiving], **settings: Any) -> AsyncIterator[BroadcastSender]:
    """An open sender. settings: of `BroadcastSender.connect`, besides what every test has."""
    registry = Registry()
    registry.workers = {worker.id: worker for worker in workers}

    shared = {"run": "r", "lineage": "l", "device": CPU, "host": "127.0.0.1", "timeout_s": 20.0}
    async with (
        registry.served() as address,
        BroadcastSender.connect(address, "", **(shared | settings)) as sender,
    ):
        yield sender
