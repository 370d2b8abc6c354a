"""A hit on one host: frames from the media service's shared memory, against Redis, memcpy and a plain mmap.

    python bench/media/hit_path.py [--rounds 30]

Service and Redis are processes of their own, the caller is Python, and every row touches every byte (an exclusive or over
64-bit words). 25 MB: the 32 frames of a 672x384 clip. 200 KB: one picture of 258x258. Cold: nothing is known or mapped in
this process (Redis: a new connection); the bytes themselves are in memory in every row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.service import load_tokens, peer
from omnifleet.types import MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_from_wire

FRAMES, HEIGHT, WIDTH = 32, 384, 672
SIDE = 258
PICTURES = 300


def touch(data: Any) -> int:
    """Read every byte (all but the last seven of an odd length, which are read one by one)."""
    flat = np.frombuffer(data, np.uint8).reshape(-1) if not isinstance(data, np.ndarray) else data.reshape(-1)
    whole = len(flat) // 8 * 8
    return int(np.bitwise_xor.reduce(flat[:whole].view(np.uint64))) ^ int(flat[whole:].sum())


def clip_file() -> bytes:
    """An H.264 clip of FRAMES frames of moving noise."""
    import av

    out = io.BytesIO()
    chance = np.random.default_rng(0)
    wide = chance.integers(0, 256, (HEIGHT, WIDTH + 8 * FRAMES, 3), np.uint8)
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(wide[:, 8 * i : 8 * i + WIDTH]), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def picture_file(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


@contextlib.asynccontextmanager
async def media(folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """A media service process; answers a way to open clients of it."""
    settings = ("media.processors=[]", "media.limits.decode_seconds=120")
    options = [part for setting in settings for part in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omnifleet_media", "serve", "--run-dir", str(folder), *options
    )
    try:
        address = await peer(folder, "media", deadline_s=120)
        secret = load_tokens(folder).secret(Scope.ENV)
        yield lambda **settings: MediaClient.open(address, secret, **settings)
    finally:
        process.terminate()
        await process.wait()


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    options = ["--port", "0", "--unixsocket", "s", "--save", "", "--logfile", "log"]
    process = subprocess.Popen(["redis-server", *options], cwd=folder)
    try:
        while not (folder / "s").exists():
            time.sleep(0.01)
        yield f"unix://{folder / 's'}?db=0"
    finally:
        process.kill()
        process.wait()


async def medians(rounds: int, rows: dict[str, Callable[[], Awaitable[Any]]]) -> dict[str, float]:
    """Median milliseconds of each row; every round runs each row once, so that noise and caches meet all of them."""
    took: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, call in rows.items():
            start = time.perf_counter()
            await call()
            took[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in took.items()}


async def frame_set(opened: Callable[..., Any], url: str, folder: Path, rounds: int) -> None:
    async with (
        opened() as client,
        opened(cache_bytes=0) as keeping_nothing,
        opened(same_host=False, cache_bytes=0) as elsewhere,
    ):
        contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=FRAMES)
        reply = await client.put(clip_file(), "bench", kind=MediaKind.VIDEO, contract=contract)
        ref = media_from_wire(reply.ref)
        data = b"".join(frame.tobytes() for frame in await client.frames(ref))
        assert len(data) == FRAMES * HEIGHT * WIDTH * 3 == reply.info.bytes
        path = folder / "frames"
        path.write_bytes(data)
        connection = redis.Redis.from_url(url)
        connection.set("frames", data)
        source, target = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)

        async def read(of: MediaClient) -> None:
            for frame in await of.frames(ref):
                touch(frame)

        async def cold() -> None:
            client.forget()
            await read(client)

        async def redis_cold() -> None:
            with redis.Redis.from_url(url) as fresh:
                touch(fresh.get("frames"))

        async def redis_warm() -> None:
            touch(connection.get("frames"))

        async def memcpy() -> None:
            np.copyto(target, source)
            touch(target)

        async def mapped_cold() -> None:
            with path.open("rb") as file:
                touch(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

        with path.open("rb") as file:
            kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        async def mapped_warm() -> None:
            touch(kept)

        times = await medians(
            rounds,
            {
                "redis GET, new connection": redis_cold,
                "redis GET, warm": redis_warm,
                "memcpy": memcpy,
                "mmap, new map": mapped_cold,
                "mmap, kept map": mapped_warm,
                "ours, cold": cold,
                "ours, new maps": lambda: read(keeping_nothing),
                "ours, warm": lambda: read(client),
                "ours, streamed": lambda: read(elsewhere),
            },
        )
        path.unlink()
    print(f"\n{len(data) / 1e6:.1f} MB frame set, all bytes touched (median of {rounds})")
    for what, took in times.items():
        print(f"  {what:28} {took:8.2f} ms")
    for above, below in (
        ("redis GET, warm", "ours, warm"),
        ("redis GET, new connection", "ours, cold"),
        ("ours, warm", "mmap, kept map"),
        ("ours, new maps", "mmap, new map"),
        ("ours, cold", "mmap, new map"),
    ):
        print(f"  {above} / {below}: {times[above] / times[below]:.1f}", flush=True)


async def pictures(opened: Callable[..., Any], url: str) -> None:
    connection = redis.Redis.from_url(url)
    async with opened() as client:
        refs = [await client.put_image(picture_file(seed), "bench") for seed in range(PICTURES)]
        for ref in refs:
            connection.set(ref.digest, (await client.frame(ref)).tobytes())
        await hit_times(client, refs, connection)


async def hit_times(client: MediaClient, refs: list[MediaRef], connection: redis.Redis) -> None:
    async def each(get: Callable[[MediaRef], Awaitable[Any]]) -> tuple[float, float]:
        took = []
        for ref in refs:
            start = time.perf_counter()
            touch(await get(ref))
            took.append((time.perf_counter() - start) * 1e6)
        took.sort()
        return statistics.median(took), took[len(took) * 99 // 100]

    async def asked(ref: MediaRef) -> Any:
        client.forget()
        return await client.frame(ref)

    async def from_redis(ref: MediaRef) -> Any:
        return connection.get(ref.digest)

    kept = await each(client.frame)
    content, client._content = client._content, type(client._content)(0)
    anew = await each(client.frame)
    client._content = content
    rows = {
        "ours, kept by the client": kept,
        "ours, mapped anew": anew,
        "ours, nothing known": await each(asked),
        "redis GET": await each(from_redis),
    }
    print(f"\n{SIDE * SIDE * 3 / 1e3:.0f} KB picture, all bytes touched: p50 and p99 of {len(refs)}")
    for what, (p50, p99) in rows.items():
        print(f"  {what:32} {p50:8.0f} us {p99:8.0f} us")


async def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="om-hit-", dir="/dev/shm") as name:
        folder = Path(name)
        with redis_server(folder) as url:
            async with media(folder) as opened:
                await frame_set(opened, url, folder, rounds)
                await pictures(opened, url)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    asyncio.run(run(options.parse_args().rounds))


if __name__ == "__main__":
    main()
