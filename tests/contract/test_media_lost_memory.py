"""A Redis that was killed may have lost the end of its file: what it forgot is told anew, never called lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from tests.contract.media_world import png, running
from tests.support_redis import redis_server


async def test_what_a_killed_redis_forgot_is_found_again(tmp_path: Path) -> None:
    with redis_server() as redis:
        async with (
            running(tmp_path, index=redis.url) as service,
            MediaClient.open(service.grpc, deadline_s=60) as client,
        ):
            ref = await client.put_image(png(), "run")
            for key in redis.ask("KEYS", f"*{ref.digest}*"):
                redis.ask("DEL", key)
            redis.kill()
            await asyncio.to_thread(redis.start)
            lease = await client.take_lease([ref.digest], "o", "run", 60)
            assert (await client.stat(ref.digest)).leases == 1
            assert await client.release_lease(lease)


async def test_what_was_told_between_two_looks_is_not_lost(tmp_path: Path) -> None:
    """The first look fell into the time in which the index was told; by the second it knows all."""
    async with running(tmp_path) as service, MediaClient.open(service.grpc, deadline_s=20) as client:
        ref = await client.put_image(png(), "run")
        index: Any = service.library.index
        take, looks = index.take_lease, 0

        async def late(lease: Any, digests: Any) -> Any:
            nonlocal looks
            looks += 1
            return list(digests) if looks == 1 else await take(lease, digests)

        index.take_lease = late
        assert (await client.take_lease([ref.digest], "o", "run", 60)).owner == "o"
        assert looks == 2


@pytest.mark.parametrize("memories", [("",), ("a", "b")], ids=["none", "another"])
async def test_nothing_is_an_orphan_to_an_index_that_may_have_forgotten(
    tmp_path: Path, memories: tuple[str, ...]
) -> None:
    async with running(tmp_path) as service, MediaClient.open(service.grpc, deadline_s=20) as client:
        ref = await client.put_image(png(), "run")
        index: Any = service.library.index
        said = iter(memories)

        async def memory(store: str) -> str:
            return next(said, memories[-1])

        async def nothing(*_: Any) -> None:
            return None

        known = {name: getattr(index, name) for name in ("memory", "read_object", "read_frame")}
        index.memory, index.read_object, index.read_frame = memory, nothing, nothing
        with pytest.raises(OmnifleetError) as caught:
            await service.library.retention.collect(1 << 40, dry_run=False)
        assert (caught.value.reason, caught.value.retryable) == (Reason.UNAVAILABLE, True)
        for name, value in known.items():
            setattr(index, name, value)
        assert (await client.frame(ref)).shape
