"""A media service in this process, and small pictures to feed it."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omnifleet.auth import OPEN, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.config.services import MediaConfig
from omnifleet.types import MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.server.retention import now_ms
from omnifleet_media.server.run import Running, media_service


def png(seed: int = 0, size: tuple[int, int] = (8, 6), **options: Any) -> bytes:
    """Noise of (width, height) as a PNG; equal seeds give equal pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", **options)
    return out.getvalue()


def pixels_of(data: bytes) -> np.ndarray:
    """What Pillow sees in an RGB file."""
    return np.asarray(Image.open(io.BytesIO(data)))


@asynccontextmanager
async def running(folder: Path, tokens: Tokens = OPEN, **settings: Any) -> AsyncIterator[Running]:
    """A service without processors unless the settings name some."""
    settings = {"processors": (), "shared_memory": folder / "shm", **settings}
    async with media_service(MediaConfig(**settings), folder, tokens) as service:
        yield service


@asynccontextmanager
async def served(folder: Path, deadline_s: float = 20, **settings: Any) -> AsyncIterator[MediaClient]:
    """A service and a client of it."""
    async with (
        running(folder, **settings) as service,
        MediaClient.open(service.grpc, deadline_s=deadline_s) as client,
    ):
        yield client


async def clip_of_pictures(
    service: Running, seeds: Sequence[int], size: tuple[int, int], secret: str = ""
) -> MediaObject:
    """A stored clip whose frame i is `png(seeds[i], size)` at i / 5 seconds, without a decoder of clips."""
    async with MediaClient.open(service.grpc, secret) as client:
        refs = [await client.put_image(png(seed, size), "run") for seed in seeds]
        frames = tuple([(await client.info(ref)).frame_digests[0] for ref in refs])
    times = tuple(200_000 * i for i in range(len(seeds)))
    item = MediaObject(MediaKind.VIDEO, frames, *size, times)
    await service.library.index.write_object(item, None, now_ms())
    return item
