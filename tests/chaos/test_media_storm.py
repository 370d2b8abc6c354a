"""Sixteen clients while the media service and its Redis are killed at random: nothing acknowledged is lost, no byte is wrong."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from omnifleet.address import frame_digest
from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.service import load_tokens, peer
from omnifleet.types import Lease, MediaRef
from tests.contract.media_world import pixels_of, png
from tests.support_redis import RedisServer, redis_server

CLIENTS = 16
SIZE = (24, 16)
CALL_S = 240.0


class Service:
    """One media service process that is killed and started again at the same address."""

    def __init__(self, run_dir: Path, store: Path, redis: RedisServer) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        self.address = ""
        self._settings = {
            "media.index": redis.url,
            "media.store": str(store),
            "media.shared_memory": str(store / "shm"),
            "media.processors": "[]",
        }

    async def start(self) -> None:
        """Start; returns at once if clients know the address already, else when it serves."""
        options = [part for name, value in self._settings.items() for part in ("--set", f"{name}={value}")]
        if self.address:
            options += ["--listen", self.address]
        with (self.run_dir / "log").open("a") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "omnifleet_media",
                "serve",
                "--run-dir",
                str(self.run_dir),
                *options,
                stderr=log,
            )
        if not self.address:
            self.address = await peer(self.run_dir, "media", deadline_s=120)

    async def kill(self) -> None:
        """kill -9, at once."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    @asynccontextmanager
    async def client(self, *, same_host: bool) -> AsyncIterator[MediaClient]:
        """A client that waits for restarts and keeps nothing, so that each read asks for bytes."""
        secret = load_tokens(self.run_dir).secret(Scope.OPERATOR)
        async with MediaClient.open(
            self.address, secret, deadline_s=CALL_S, cache_bytes=0, same_host=same_host, verify_mapped=True
        ) as client:
            yield client


class Storm:
    """What the clients did and were told."""

    def __init__(self) -> None:
        self.stored: dict[int, MediaRef] = {}
        self.held: dict[int, Lease] = {}
        self.reads = 0
        self.calls = 0
        self.moved = asyncio.Event()

    async def client(self, client: MediaClient, number: int) -> None:
        """One client's life: put, put again, read, lease, give back."""
        chance = random.Random(number)
        own = iter(range(number, 10**9, CLIENTS))
        while True:
            known = chance.choice(list(self.stored)) if self.stored else None
            act = chance.random()
            if known is None or act < 0.35:
                seed = next(own)
                self.stored[seed] = await client.put_image(
                    png(seed, SIZE), "run", durable=chance.random() < 0.2
                )
            elif act < 0.45:
                assert await client.put_image(png(known, SIZE), "run") == self.stored[known]
            elif act < 0.85:
                await self.read(client, known)
            elif known not in self.held:
                lease = await client.take_lease([self.stored[known].digest], f"client-{number}", "run", 3600)
                if self.held.setdefault(known, lease) is not lease:
                    await client.release_lease(lease)
            else:
                await client.release_lease(self.held.pop(known))
            self.calls += 1
            self.moved.set()

    async def read(self, client: MediaClient, seed: int) -> None:
        """Read a picture and check each byte."""
        info = await client.info(self.stored[seed])
        pixels = np.ascontiguousarray(await client.frame(self.stored[seed]))
        assert frame_digest(pixels) == info.frame_digests[0]
        assert (pixels == pixels_of(png(seed, SIZE))).all()
        self.reads += 1

    async def some_calls(self, more: int) -> None:
        """Return once that many more calls were answered."""
        goal = self.calls + more
        while self.calls < goal:
            self.moved.clear()
            await self.moved.wait()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("services", "kills", "seconds"),
    [(1, 3, 0), pytest.param(2, 0, 600, marks=[pytest.mark.soak, pytest.mark.timeout(1500)])],
)
async def test_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, services: int, kills: int, seconds: int
) -> None:
    chance = random.Random(services)
    storm = Storm()
    (tmp_path / "store").mkdir()
    with redis_server(
        "--appendfsync", "always"
    ) as redis:  # else a killed Redis may forget a lease of its last seconds
        async with AsyncExitStack() as stack:
            running = [Service(tmp_path / f"run{i}", tmp_path / "store", redis) for i in range(services)]
            for service in running:
                await service.start()
                stack.push_async_callback(service.kill)
            clients = [
                await stack.enter_async_context(running[i % services].client(same_host=i % 4 < 2))
                for i in range(CLIENTS)
            ]
            lives = [asyncio.create_task(storm.client(client, i)) for i, client in enumerate(clients)]
            storming = asyncio.create_task(_kill_at_random(storm, running, redis, chance, kills, seconds))
            await asyncio.wait((*lives, storming), return_when=asyncio.FIRST_COMPLETED)
            for life in lives:
                life.cancel()
            ends = await asyncio.gather(*lives, return_exceptions=True)
            assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []
            await storming
            await _check(storm, clients)
            print(
                f"{storm.calls} calls, {storm.reads} reads, {len(storm.stored)} pictures, {storming.result()} kills"
            )


async def _kill_at_random(
    storm: Storm, services: list[Service], redis: RedisServer, chance: random.Random, kills: int, seconds: int
) -> int:
    end = time.monotonic() + seconds
    done = 0
    while done < kills or time.monotonic() < end:
        async with asyncio.timeout(CALL_S):
            await storm.some_calls(chance.randint(5, 120))
        service = services[chance.randrange(len(services))]
        victims = ("redis", "service", "both")
        victim = victims[done % 3] if kills else chance.choice(victims)
        if victim != "service":
            redis.kill()
        if victim != "redis":
            await service.kill()
            await service.start()
        if victim != "service":
            await asyncio.to_thread(redis.start)
        done += 1
    async with asyncio.timeout(CALL_S):
        await storm.some_calls(20)
    return done


async def _check(storm: Storm, clients: list[MediaClient]) -> None:
    assert len(storm.stored) > CLIENTS
    assert storm.reads > CLIENTS
    async with asyncio.TaskGroup() as group:
        for i, client in enumerate(clients):
            group.create_task(_read_all(storm, client, list(storm.stored)[i::CLIENTS]))
    for seed in storm.held:
        assert (await clients[0].stat(storm.stored[seed].digest)).leases >= 1
    assert (await clients[0].verify()).corrupt == ()
    await clients[0].collect(1 << 40)
    assert (await clients[0].collect(1 << 40, dry_run=True)).orphans == 0


async def _read_all(storm: Storm, client: MediaClient, seeds: list[int]) -> None:
    for seed in seeds:
        await storm.read(client, seed)
