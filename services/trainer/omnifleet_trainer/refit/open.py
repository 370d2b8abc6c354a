"""The sender and the guard that a recipe asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from omnifleet.config.recipe import RefitConfig
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.guard import Canary, Guard
from omnifleet_trainer.refit.sender import RefitSender


@asynccontextmanager
async def open_sender(
    config: RefitConfig, fleet_address: str, secret: str, **settings: Any
) -> AsyncIterator[RefitSender]:
    """Connect a sender of the configured transport; settings: see `RefitSender`. The snapshot lies on the first GPU."""
    if config.transport == "shm":
        sending = FileSender.open(
            fleet_address,
            secret,
            rolling=config.rolling,
            sparse=config.sparse,
            without_shadow=config.without_shadow,
            **settings,
        )
        async with sending as sender:
            yield sender
        return
    import torch

    from omnifleet_trainer.refit.broadcast import BroadcastSender

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    async with BroadcastSender.connect(
        fleet_address,
        secret,
        device=torch.device(device),
        transport=config.transport,
        host=config.host,
        device_bucket_bytes=config.bucket_bytes,
        rolling=config.rolling,
        sparse=config.sparse,
        without_shadow=config.without_shadow,
        **settings,
    ) as sender:
        yield sender


def open_guard(
    config: RefitConfig, secret: str, expect: Callable[[StepBatch], Awaitable[list[float]]]
) -> Guard | None:
    """The canary, if there is one. expect: the trainer's logprobs of a sample under its weights of now."""
    if config.canary is None:
        return None
    canary = Canary(config.canary.prompt, config.canary.reply, config.canary.tolerance)
    return Guard(canary, secret, expect)
