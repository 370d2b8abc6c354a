"""Budgets, leases and collection of the running service."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError, Reason
from tests.contract.media_world import png, served

SIZE = (100, 100)  # 30,000 bytes of pixels and about as much of source
ROOM = 150_000  # for two of them


async def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    async with served(tmp_path, disk_bytes=ROOM) as client:
        refs = [await client.put_image(png(i, SIZE), "run") for i in range(4)]
        counters = (await client.status()).counters
        present = await client.has([ref.digest for ref in refs])
    assert counters["disk_bytes_used"] <= ROOM
    assert counters["evictions"] > 0
    assert present[0] is False
    assert present[3] is True


async def test_a_lease_prevents_eviction(tmp_path: Path) -> None:
    async with served(tmp_path, disk_bytes=ROOM) as client:
        kept = await client.put_image(png(0, SIZE), "run")
        lease = await client.take_lease([kept.digest], "trainer", "run", 60)
        for i in range(1, 5):
            await client.put_image(png(i, SIZE), "run")
        assert await client.has([kept.digest]) == [True]
        assert (await client.stat(kept.digest)).leases == 1
        assert await client.release_lease(lease)
        for i in range(5, 9):
            await client.put_image(png(i, SIZE), "run")
        assert await client.has([kept.digest]) == [False]


async def test_an_upload_can_lease_its_object_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        reply = await client.put(png(), "run", lease_owner="buffer", lease_ttl_ms=60_000)
        assert reply.lease.owner == "buffer"
        assert (await client.stat(reply.ref.digest)).leases == 1
        await client.collect(0)
        assert await client.has([reply.ref.digest]) == [True]


async def test_when_all_is_leased_an_upload_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, disk_bytes=ROOM) as client:
        replies = [await client.put(png(0, SIZE), "run", lease_owner="o", lease_ttl_ms=60_000)]
        with pytest.raises(OmnifleetError) as caught:
            for i in range(1, 6):
                replies.append(await client.put(png(i, SIZE), "run", lease_owner="o", lease_ttl_ms=60_000))
        assert (caught.value.reason, caught.value.knob) == (Reason.DISK_FULL, "media.disk_bytes")
        assert all(await client.has([reply.ref.digest for reply in replies]))


async def test_a_lease_that_has_ended_is_not_renewed(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        ref = await client.put_image(png(), "run")
        lease = await client.take_lease([ref.digest], "o", "run", 60)
        longer = await client.renew_lease(lease, 120)
        assert longer.expires_unix_ms > lease.expires_unix_ms
        await client.release_lease(lease)
        assert not await client.release_lease(lease)
        with pytest.raises(OmnifleetError) as caught:
            await client.renew_lease(lease, 60)
        assert caught.value.reason is Reason.NOT_FOUND


async def test_collection_removes_orphans_and_says_so_before(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        orphan = tmp_path / "media" / "blobs" / "frame" / "ab" / "ab" / ("ab" * 32)
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(bytes(10))
        looked = await client.collect(1 << 30, dry_run=True)
        assert (looked.orphans, looked.freed_bytes, looked.removed) == (1, 10, 0)
        assert orphan.exists()
        assert await client.collect(1 << 30) == looked
        assert not orphan.exists()
        everything = await client.collect(0, dry_run=True)
        assert await client.has([ref.digest]) == [True]
        assert await client.collect(0) == everything
        assert await client.has([ref.digest]) == [False]
