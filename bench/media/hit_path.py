"""A hit on one host: frames from the media service's shared memory, against Redis, memcpy and a plain mmap.

    python bench/media/hit_path.py [--rounds 30] [--seed 0] [--clip h264|png]

Service and Redis are processes of their own, the caller is Python, and every row touches every byte (an exclusive or over
64-bit words). 25 MB: the 32 frames of a 672x384 clip. 200 KB: one picture of 258x258. The bytes are in memory in every row.
redis-py parses answers in Python or, where it is installed, with hiredis: then there are rows of both.
Cold: a client that is connected and knows nothing of the clip; one call: nor where shared memory is, as after a restart of
the service; new client: connection and handshake are part of it, too. Of each row, the time until all bytes were touched,
and the time to let go of what it had (unmap, free). Every round runs all rows in an order of
its own. The stages of a cold hit follow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
from PIL import Image
from redis_get import PARSERS, redis_client, redis_rows, redis_server
from rows import Row, in_turn, touch

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.client.media.shared import SharedFolder
from omnifleet.service import load_tokens, peer
from omnifleet.types import MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_from_wire

FRAMES, HEIGHT, WIDTH = 32, 384, 672
SIDE = 258
PICTURES = 300


def clip_file(form: str) -> bytes:
    """FRAMES frames of moving noise: an H.264 clip, or an animated PNG where no TorchCodec is installed."""
    out = io.BytesIO()
    chance = np.random.default_rng(0)
    wide = chance.integers(0, 256, (HEIGHT, WIDTH + 8 * FRAMES, 3), np.uint8)
    if form == "png":
        first, *rest = (Image.fromarray(wide[:, 8 * i : 8 * i + WIDTH]) for i in range(FRAMES))
        first.save(out, "PNG", save_all=True, append_images=rest, duration=125, compress_level=1)
        return out.getvalue()
    import av

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


async def stages(client: MediaClient, ref: MediaRef, rounds: int) -> dict[str, float]:
    """Median milliseconds of the parts of a cold hit; of one that needs no call, all but the first."""
    parts: dict[str, list[float]] = {"call": [], "map": [], "touch": [], "unmap": []}
    for _ in range(rounds):
        know_nothing(client)
        marks = [time.perf_counter()]
        await client._about_to_map(ref)
        marks.append(time.perf_counter())
        frames = await client.frames(ref)
        marks.append(time.perf_counter())
        for frame in frames:
            touch(frame)
        marks.append(time.perf_counter())
        del frames, frame
        client.forget()
        marks.append(time.perf_counter())
        for name, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append((end - start) * 1e3)
    return {name: statistics.median(took) for name, took in parts.items()}


def know_nothing(client: MediaClient) -> None:
    """Not even where shared memory is."""
    client.forget()
    client._shared = SharedFolder()


def compared() -> Iterator[tuple[str, str]]:
    """Rows of a frame set whose ratios are told."""
    for redis_get in PARSERS:
        yield f"{redis_get}, warm", "ours, warm"
        for ours in ("ours, cold", "ours, cold, one call", "ours, new client"):
            yield f"{redis_get}, new connection", ours
    yield "ours, warm", "mmap, kept map"
    yield "ours, cold", "mmap, new map"
    yield "ours, cold", "mmap, new map, all at once"


async def frame_set(
    opened: Callable[..., Any], url: str, folder: Path, rounds: int, seed: int, form: str
) -> None:
    async with (
        opened() as client,
        opened() as cold,
        opened() as lost,
        opened(same_host=False, cache_bytes=0) as elsewhere,
    ):
        contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=FRAMES)
        reply = await client.put(clip_file(form), "bench", kind=MediaKind.VIDEO, contract=contract)
        ref = media_from_wire(reply.ref)
        data = b"".join(frame.tobytes() for frame in await client.frames(ref))
        assert len(data) == FRAMES * HEIGHT * WIDTH * 3 == reply.info.bytes
        path = folder / "frames"
        path.write_bytes(data)
        redis.Redis.from_url(url).set("frames", data)
        source, target = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)

        async def read(of: MediaClient) -> Any:
            frames = await of.frames(ref)
            for frame in frames:
                touch(frame)
            return frames

        async def read_as_new() -> Any:
            async with opened() as fresh:
                return await read(fresh)

        async def memcpy() -> None:
            np.copyto(target, source)
            touch(target)

        async def mapped(flags: int) -> Any:
            with path.open("rb") as file:
                got = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | flags, mmap.PROT_READ)
                touch(got)
                return got

        with path.open("rb") as file:
            kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        async def mapped_warm() -> None:
            touch(kept)

        rows = {
            **redis_rows(url, "frames"),
            "memcpy": Row(memcpy),
            "mmap, new map": Row(lambda: mapped(0)),
            "mmap, new map, all at once": Row(lambda: mapped(mmap.MAP_POPULATE)),
            "mmap, kept map": Row(mapped_warm),
            "ours, new client": Row(read_as_new),
            "ours, cold": Row(lambda: read(cold), cold.forget),
            "ours, cold, one call": Row(lambda: read(lost), lambda: know_nothing(lost)),
            "ours, warm": Row(lambda: read(client)),
            "ours, streamed": Row(lambda: read(elsewhere)),
        }
        for warm_up in rows.values():
            await warm_up.once()
            warm_up.took.clear()
            warm_up.let_go.clear()
        times = await in_turn(rounds, rows, random.Random(seed))
        parts = await stages(lost, ref, rounds)
        path.unlink()
    print(f"\n{len(data) / 1e6:.1f} MB frame set, all bytes touched (median ms of {rounds}); then to let go")
    for what, (took, let_go) in times.items():
        print(f"  {what:28} {took:8.2f} {let_go:8.2f}")
    print("  stages, one call: " + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()))
    for above, below in compared():
        whole = sum(times[above]) / sum(times[below])
        print(
            f"  {above} / {below}: {times[above][0] / times[below][0]:.1f}, with letting go {whole:.1f}",
            flush=True,
        )


async def pictures(opened: Callable[..., Any], url: str) -> None:
    clients = {name: redis_client(url, parser) for name, parser in PARSERS.items()}
    async with opened() as client:
        refs = [await client.put_image(picture_file(seed), "bench") for seed in range(PICTURES)]
        for ref in refs:
            clients["redis GET"].set(ref.digest, (await client.frame(ref)).tobytes())
        await hit_times(client, refs, clients)


async def hit_times(client: MediaClient, refs: list[MediaRef], clients: dict[str, redis.Redis]) -> None:
    async def each(get: Callable[[MediaRef], Awaitable[Any]]) -> tuple[float, float]:
        took = []
        for ref in refs:
            start = time.perf_counter()
            touch(await get(ref))
            took.append((time.perf_counter() - start) * 1e6)
        took.sort()
        return statistics.median(took), took[len(took) * 99 // 100]

    async def asked(ref: MediaRef) -> Any:
        know_nothing(client)
        return await client.frame(ref)

    def from_redis(connection: redis.Redis) -> Callable[[MediaRef], Awaitable[Any]]:
        async def get(ref: MediaRef) -> Any:
            return connection.get(ref.digest)

        return get

    kept = await each(client.frame)
    content, client._content = client._content, type(client._content)(0)
    anew = await each(client.frame)
    client._content = content
    rows = {
        "ours, kept by the client": kept,
        "ours, mapped anew": anew,
        "ours, nothing known": await each(asked),
        **{name: await each(from_redis(connection)) for name, connection in clients.items()},
    }
    print(f"\n{SIDE * SIDE * 3 / 1e3:.0f} KB picture, all bytes touched: p50 and p99 of {len(refs)}")
    for what, (p50, p99) in rows.items():
        print(f"  {what:32} {p50:8.0f} us {p99:8.0f} us")


async def run(rounds: int, seed: int, form: str) -> None:
    with tempfile.TemporaryDirectory(prefix="om-hit-", dir="/dev/shm") as name:
        folder = Path(name)
        with redis_server(folder) as url:
            async with media(folder) as opened:
                await frame_set(opened, url, folder, rounds, seed, form)
                await pictures(opened, url)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--seed", type=int, default=0, help="of the order of rows")
    options.add_argument("--clip", choices=("h264", "png"), default="h264", help="png needs no TorchCodec")
    given = options.parse_args()
    asyncio.run(run(given.rounds, given.seed, given.clip))


if __name__ == "__main__":
    main()
