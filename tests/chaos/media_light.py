"""A library without decoder processes: everything else of the media service is real. For deaths by the hundred."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from omnifleet.config.services import MediaConfig
from omnifleet.telemetry.counters import Counters
from omnifleet.types import MediaKind
from omnifleet_media.address.contract import DecodeContract
from omnifleet_media.decode.request import Decoded, Keep, Kept
from omnifleet_media.index.port import Index, Kind
from omnifleet_media.ingest.sniff import SourceType
from omnifleet_media.ingest.source import Source
from omnifleet_media.server.library import Library
from omnifleet_media.server.opening import opened_index, opened_store
from omnifleet_media.server.retention import Retention

HEIGHT, WIDTH = 8, 6
FRAME_BYTES = HEIGHT * WIDTH * 3


class InstantDecoder:
    """Sources are canonical frames already, one after the other; `before` runs ahead of each decode."""

    def __init__(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        self._before = before
        self.decodes = 0

    async def decode(self, source: Source, contract: DecodeContract, keep: Keep[Kept]) -> Kept:
        """Frames of HEIGHT x WIDTH; more than one is a clip of one frame a second."""
        if self._before is not None:
            await self._before()
        self.decodes += 1
        frames = list(np.frombuffer(source.data, np.uint8).reshape(-1, HEIGHT, WIDTH, 3))
        count, size, take = len(frames), (WIDTH, HEIGHT), frames.__getitem__
        if count == 1:
            return keep(Decoded(MediaKind.IMAGE, 1, take, FRAME_BYTES, size))
        times = [float(i) for i in range(count)]
        return keep(Decoded(MediaKind.VIDEO, count, take, len(source.data), size, times))

    async def close(self) -> None:
        """Nothing to end."""


def source_of(*seeds: int) -> Source:
    """Frames of noise, one a seed."""
    frames = [np.random.default_rng(seed).integers(0, 256, FRAME_BYTES, np.uint8).tobytes() for seed in seeds]
    kind = MediaKind.IMAGE if len(seeds) == 1 else MediaKind.VIDEO
    return Source(b"".join(frames), SourceType("image/x-raw", kind))


@asynccontextmanager
async def light_library(
    folder: Path, decoder: InstantDecoder | None = None, processor: Any = None, **settings: Any
) -> AsyncIterator[Library]:
    """A library over FOLDER/media as the service would open it."""
    config = MediaConfig(**{"processors": (), "shared_memory": folder / "shm", **settings})
    async with (
        opened_store(config, folder / "media") as store,
        opened_index(config, folder / "media") as index,
    ):
        counters = Counters("media")
        retention = Retention(store, index, config.disk_bytes, counters)
        nobody: Any = InstantDecoder()
        instant: Any = decoder or nobody
        library = Library(config, store, index, retention, instant, processor or nobody, counters)
        await library.recovery.recover()
        yield library
        await library.close()


async def everything_is_whole(library: Library) -> None:
    """Each object that the index knows has all its bytes, nothing else is on disk, and the count is right."""
    index: Index = library.index
    for digest in await index.recent(10_000):
        item = await library.read(digest)
        assert await library.holds(await blobs_of(library, digest)), item
    await library.retention.collect(1 << 40, dry_run=False)
    looked = await library.retention.collect(1 << 40, dry_run=True)
    assert (looked.orphans, looked.freed_bytes) == (0, 0)
    assert (await library.retention.verify(()))[1] == []
    disk = library.store.disk
    assert disk.used == sum(size for _, _, size in await asyncio.to_thread(lambda: list(disk.walk())))


async def blobs_of(library: Library, digest: Any) -> list[Any]:
    """Manifest and frames of an object."""
    item = await library.read(digest)
    return [
        await library.blob(Kind.MANIFEST, digest),
        *[await library.blob(Kind.FRAME, f) for f in item.frames],
    ]
