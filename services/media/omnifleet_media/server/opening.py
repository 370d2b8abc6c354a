"""From settings to an open store and index. What is not configured is not loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.index.port import Index
from omnifleet_media.index.sqlite import SqliteIndex
from omnifleet_media.store.disk import DiskTier
from omnifleet_media.store.objects import ObjectTier
from omnifleet_media.store.shared import SharedTier
from omnifleet_media.store.tiers import Policy, Store


@asynccontextmanager
async def opened_store(config: MediaConfig, root: Path) -> AsyncIterator[Store]:
    """The tiers under `root`. Raises OmnifleetError: INVALID_CONFIG, CONFLICT."""
    objects = None
    if config.object_store:
        objects = await asyncio.to_thread(ObjectTier, config.object_store, config.object_store_options)
    disk = await asyncio.to_thread(DiskTier, root / "blobs")
    try:
        shared = SharedTier(
            config.shared_memory,
            config.shared_memory_bytes,
            for_everyone=config.shared_memory_readers == "everyone",
        )
        try:
            yield Store(
                disk,
                shared,
                objects,
                Policy(
                    memory_bytes=config.memory_bytes,
                    share=config.shared_memory_when,
                    upload_on_put=config.object_store_when == "put",
                ),
            )
        finally:
            shared.close()
    finally:
        disk.close()


@asynccontextmanager
async def opened_index(config: MediaConfig, root: Path) -> AsyncIterator[Index]:
    """The index that `media.index` names. Raises OmnifleetError: INVALID_CONFIG, UNAVAILABLE."""
    index: Index
    if config.index == "sqlite":
        index = SqliteIndex(root / "index.sqlite")
    else:
        index = await _redis(config.index)
    try:
        yield index
    finally:
        await index.close()


async def _redis(url: str) -> Index:
    try:
        from omnifleet_media.index.redis import RedisIndex
    except ImportError:
        raise OmnifleetError(
            Reason.INVALID_CONFIG,
            "a Redis index needs the redis package here",
            knob="pip install 'omnifleet-media[redis]'",
        ) from None
    index = RedisIndex(url)
    try:
        await index.check()
    except BaseException:
        await index.close()
        raise
    return index
