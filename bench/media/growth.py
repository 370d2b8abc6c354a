"""How the index behaves as it grows: lookups, leases and eviction at 10,000 and at 1,000,000 objects, bytes an object.

    python bench/media/growth.py [--objects 1000000] [--index sqlite redis]

An object here is one picture: object, frame, alias and source. It is filled in bulk with the index's own statements, and
measured through its port, one call at a time. Both lie in memory: SQLite's file in /dev/shm, as if the page cache held
it; Redis is a server that this script starts, without its append-only file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from omnifleet.address import digest_bytes
from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index import scripts
from omnifleet_media.index.codec import object_facts
from omnifleet_media.index.port import Entry, Index, Unit
from omnifleet_media.index.redis import RedisIndex
from omnifleet_media.index.sqlite import SqliteIndex

SMALL = 10_000
SAMPLES = 2_000
EVICT = 256
FOREVER = 1 << 45
BULK = {"sqlite": 250_000, "redis": 5_000}  # one transaction, one pipeline


def name(kind: str, i: int) -> Digest:
    return digest_bytes(f"{kind}{i}".encode(), "bench")


def picture(i: int) -> MediaObject:
    facts = {"mime": "image/jpeg", "source_bytes": "123456"}
    return MediaObject(MediaKind.IMAGE, (name("frame", i),), 640, 480, facts=facts)


async def fill_sqlite(index: SqliteIndex, first: int, last: int) -> None:
    import json

    def step(db: Any) -> None:
        (pages,) = db.execute("PRAGMA cache_size").fetchone()
        db.execute("PRAGMA cache_size = -2000000")  # filled in memory, measured with the index's own cache
        rows(db)
        db.execute(f"PRAGMA cache_size = {pages}")

    def rows(db: Any) -> None:
        for i in range(first, last):
            item = picture(i)
            row = (item.digest, "image", 640, 480, "[]", json.dumps(dict(item.facts)), i, item.bytes)
            db.execute("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            db.execute("INSERT INTO frames VALUES (?, 0, ?)", (item.digest, item.frames[0]))
            db.execute("INSERT INTO aliases VALUES (?, ?)", (name("alias", i), item.digest))
            db.execute("INSERT INTO sources VALUES (?, ?, ?)", (name("source", i), FOREVER, 123456))

    await index._write(step)


async def fill_redis(index: RedisIndex, first: int, last: int) -> None:
    import json

    redis = index._redis
    write_object = await redis.script_load(scripts.PRELUDE + scripts.WRITE_OBJECT)
    write_source = await redis.script_load(scripts.PRELUDE + scripts.WRITE_SOURCE)
    pipe = redis.pipeline(transaction=False)
    for i in range(first, last):
        item = picture(i)
        body = json.dumps(object_facts(item), separators=(",", ":"))
        alias = name("alias", i)
        pipe.evalsha(
            write_object,
            0,
            "omnifleet:",
            item.digest,
            alias,
            body,
            "480 640",
            i,
            item.bytes,
            "",
            0,
            *item.frames,
        )
        pipe.evalsha(write_source, 0, "omnifleet:", name("source", i), 123456, FOREVER)
    await pipe.execute()


async def measured(calls: list[Callable[[], Awaitable[Any]]]) -> float:
    """Median microseconds of one call."""
    took = []
    for call in calls:
        start = time.perf_counter()
        await call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


async def measure(index: Index, objects: int, evicted: int) -> dict[str, float]:
    chance = random.Random(objects)
    live = range(evicted, objects)
    some = [chance.choice(live) for _ in range(SAMPLES)]
    items = {i: picture(i) for i in some}

    async def lookup(i: int) -> None:
        media = await index.find_alias(name("alias", i))
        assert media is not None and await index.read_object(media) is not None

    async def missing(i: int) -> None:
        assert await index.find_alias(name("nothing", i)) is None

    async def take(i: int) -> None:
        lease = Lease(f"lease-{i}", "owner", "run", FOREVER)
        assert await index.take_lease(lease, [items[i].digest]) == []

    async def forget(entry: Entry) -> None:
        assert await index.forget(entry, 0) is not None

    unique = list(dict.fromkeys(some))
    times = {
        "lookup": await measured([lambda i=i: lookup(i) for i in some]),
        "miss": await measured([lambda i=i: missing(i) for i in some]),
        "frame": await measured([lambda i=i: index.read_frame(items[i].frames[0]) for i in some]),
        "lease": await measured([lambda i=i: take(i) for i in unique]),
        "release": await measured([lambda i=i: index.release_lease(f"lease-{i}") for i in unique]),
    }
    start = time.perf_counter()
    entries = [entry for entry in await index.idle(0, EVICT) if entry.unit is Unit.OBJECT]
    times["idle (256)"] = (time.perf_counter() - start) * 1e6
    times["forget"] = await measured([lambda entry=entry: forget(entry) for entry in entries])
    return times


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[tuple[Index, Any, Callable[[], int]]]:
    if kind == "sqlite":
        index = SqliteIndex(folder / "index.sqlite")
        yield index, fill_sqlite, lambda: (folder / "index.sqlite").stat().st_size  # without its log
        await index.close()
        return
    socket = folder / "s"
    server = _start_redis(folder)
    redis = RedisIndex(f"unix://{socket}?db=0", patience_s=60, reply_s=60)
    try:
        await redis.check()

        def used() -> int:
            text = subprocess.check_output(["redis-cli", "-s", str(socket), "info", "memory"], text=True)
            return int(text.split("used_memory:")[1].split()[0])

        yield redis, fill_redis, used
    finally:
        await redis.close()
        server.kill()
        server.wait()


def _start_redis(folder: Path) -> subprocess.Popen[bytes]:
    options = ["--port", "0", "--unixsocket", "s", "--save", "", "--logfile", "log"]
    return subprocess.Popen(["redis-server", *options], cwd=folder)


async def grow(kind: str, objects: int) -> None:
    with tempfile.TemporaryDirectory(prefix="om-growth-", dir="/dev/shm") as folder:
        async with opened(kind, Path(folder)) as (index, fill, used):
            before, filled, rows = used(), 0, []
            for goal in (SMALL, objects):
                while filled < goal:
                    await fill(index, filled, min(filled + BULK[kind], goal))
                    filled = min(filled + BULK[kind], goal)
                size = (used() - before) / filled
                rows.append((await measure(index, filled, EVICT * len(rows)), size))
            (small, small_size), (large, large_size) = rows
            print(f"\n{kind}: microseconds (median)        {SMALL:>10,} {objects:>10,}   ratio")
            for what in small:
                print(
                    f"  {what:34} {small[what]:>10.0f} {large[what]:>10.0f}   {large[what] / small[what]:.2f}"
                )
            print(f"  {'bytes an object':34} {small_size:>10.0f} {large_size:>10.0f}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--objects", type=int, default=1_000_000)
    options.add_argument("--index", nargs="+", default=["sqlite", "redis"], choices=["sqlite", "redis"])
    chosen = options.parse_args()
    for kind in chosen.index:
        asyncio.run(grow(kind, chosen.objects))


if __name__ == "__main__":
    main()
