"""Budgets, leases and collection of the running service."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.address.contract import still
from omnifleet_media.index.port import Entry, Kind, Unit
from omnifleet_media.server.blobs import frame_blob
from tests.chaos.media_light import FRAME_BYTES, HEIGHT, WIDTH, InstantDecoder, light_library, source_of
from tests.contract.media_world import pixels_of, png, running, served

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
        orphan = tmp_path / "media" / "blobs" / "frame" / "ab" / ("ab" * 32)
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


async def test_orphans_go_before_an_upload_is_refused(tmp_path: Path) -> None:
    async with light_library(tmp_path, disk_bytes=20 * FRAME_BYTES) as library:
        stored = await library.put(source_of(1), still(), durable=False)
        await library.retention.take_lease("run", "owner", 60_000, [stored.item.digest, stored.source])
        orphan = library.store.disk.path(Kind.FRAME, Digest("ab" * 32))
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(bytes(17 * FRAME_BYTES))
        library.store.disk._usage.add(17 * FRAME_BYTES)
        await library.put(source_of(2), still(), durable=False)
        assert not orphan.exists()
        assert await library.holds([frame_blob(stored.item.frames[0], HEIGHT, WIDTH)])


async def test_last_uses_wait_for_an_index_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with light_library(tmp_path) as library:
        made = [(await library.put(source_of(seed), still(), durable=False)).item.digest for seed in (1, 2)]
        library.retention._used.clear()
        await library.index.touch({Entry(Unit.OBJECT, digest): 2**41 + i for i, digest in enumerate(made)})

        async def away(used: object) -> None:
            raise OmnifleetError(Reason.UNAVAILABLE, "away", retryable=True)

        with monkeypatch.context() as broken:
            broken.setattr(library.index, "touch", away)
            library.retention._used[Entry(Unit.OBJECT, made[0])] = 2**42
            with pytest.raises(OmnifleetError):
                await library.retention.note()
        assert await library.index.recent(2) == [made[1], made[0]]
        await library.retention.note()
        assert await library.index.recent(2) == [made[0], made[1]]


async def test_what_the_index_says_in_part_is_made_whole_again(tmp_path: Path) -> None:
    """A frame file that was deleted by hand: the next put of the same source decodes it again."""
    decoder = InstantDecoder()
    async with light_library(tmp_path, decoder) as library:
        stored = await library.put(source_of(1), still(), durable=False)
        library.store.remove(Kind.FRAME, stored.item.frames[0])
        again = await library.put(source_of(1), still(), durable=False)
        assert (again.decoded, again.new_frames, again.new_bytes) == (True, 1, FRAME_BYTES)
        assert (await library.put(source_of(1), still(), durable=False)).decoded is False
        assert decoder.decodes == 2


async def test_what_a_reader_has_mapped_outlives_its_eviction(tmp_path: Path) -> None:
    async with running(tmp_path) as service, MediaClient.open(service.grpc, cache_bytes=0) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        pixels = await client.frame(ref)
        await client.collect(0)
        assert (pixels == pixels_of(png(0, SIZE))).all()
        with pytest.raises(OmnifleetError) as caught:
            await client.frame(ref)
        assert caught.value.reason in (Reason.NOT_FOUND, Reason.MEDIA_LOST)
        assert (await client.frame(await client.put_image(png(0, SIZE), "run")) == pixels).all()
