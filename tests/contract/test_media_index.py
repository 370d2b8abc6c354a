"""What every implementation of the index port does. Another implementation joins by a line in INDEXES."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import BlobName, Claim, Entry, Index, Kind, SegmentRecord, Unit
from omnifleet_media.index.redis import RedisIndex
from omnifleet_media.index.sqlite import SqliteIndex
from tests.support_redis import RedisServer, redis_server


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0"))


A, B, C, ALIAS, SOURCE, KEY = (digest(name) for name in ("a", "b", "c", "alias", "source", "key"))
PICTURE = MediaObject(MediaKind.IMAGE, (A,), 4, 3, facts={"mime": "image/png"})
CLIP = MediaObject(MediaKind.VIDEO, (A, B, A), 4, 3, (0, 100, 200))
SEGMENT = SegmentRecord(KEY, PICTURE.digest, digest("fingerprint"), 24, (1, 8, 12), 1000, digest("content"))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Index]:
    made: Index = SqliteIndex(tmp_path / "index.sqlite")
    if request.param == "redis":
        await made.close()
        running = request.getfixturevalue("server")
        running.ask("FLUSHALL")
        made = RedisIndex(running.url)
    yield made
    await made.close()


def lease(name: str, expires: int) -> Lease:
    return Lease(name, "owner", "run", expires)


async def test_nothing_is_there_at_first(index: Index) -> None:
    assert await index.find_alias(ALIAS) is None
    assert await index.read_object(PICTURE.digest) is None
    assert await index.read_segment(KEY) is None
    assert await index.read_frame(A) is None
    assert not await index.has_source(SOURCE)
    assert await index.idle(0, 10) == []


async def test_what_is_written_is_read(index: Index) -> None:
    for _ in range(2):  # again is harmless
        await index.write_source(SOURCE, 7, 1)
        await index.write_object(CLIP, ALIAS, 1)
        await index.write_segment(SEGMENT, 1)
    assert await index.find_alias(ALIAS) == CLIP.digest
    assert await index.read_object(CLIP.digest) == CLIP
    assert await index.read_segment(KEY) == SEGMENT
    assert await index.read_frame(B) == (3, 4)
    assert await index.has_source(SOURCE)


async def test_the_least_recently_used_is_idle_first(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 10)
    await index.write_segment(SEGMENT, 20)
    await index.write_source(SOURCE, 7, 30)
    await index.touch({Entry(Unit.OBJECT, PICTURE.digest): 25, Entry(Unit.SOURCE, SOURCE): 5})
    order = [Entry(Unit.SEGMENT, KEY), Entry(Unit.OBJECT, PICTURE.digest), Entry(Unit.SOURCE, SOURCE)]
    assert await index.idle(100, 10) == order  # a touch never moves a use back
    assert await index.idle(100, 1) == order[:1]
    assert await index.idle(100, 2, skip=1) == order[1:]


async def test_frames_of_another_object_are_kept(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    await index.write_object(CLIP, digest("other"), 1)
    names = await index.forget(Entry(Unit.OBJECT, CLIP.digest), 100)
    assert names is not None
    assert set(names) == {BlobName(Kind.MANIFEST, CLIP.digest), BlobName(Kind.FRAME, B)}
    names = await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 100)
    assert names is not None
    assert BlobName(Kind.FRAME, A) in names
    assert await index.find_alias(ALIAS) is None
    assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 100) is None


async def test_a_lease_holds_an_object_and_its_segments(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    await index.write_segment(SEGMENT, 1)
    assert await index.take_lease(lease("l", 100), [PICTURE.digest]) == []
    for entry in (Entry(Unit.OBJECT, PICTURE.digest), Entry(Unit.SEGMENT, KEY)):
        assert await index.forget(entry, 50) is None
    assert await index.idle(50, 10) == []
    assert len(await index.idle(100, 10)) == 2  # expired at 100
    assert await index.forget(Entry(Unit.SEGMENT, KEY), 100) == [BlobName(Kind.SEGMENT, KEY)]


async def test_two_leases_hold_until_both_are_gone(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    for name in ("one", "two"):
        await index.take_lease(lease(name, 100), [SOURCE, SOURCE])
    assert await index.count_leases(SOURCE, 50) == await index.count_leases(None, 50) == 2
    assert await index.release_lease("one")
    assert not await index.release_lease("one")
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 50) is None
    assert await index.release_lease("two")
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 50) is not None


async def test_a_lease_is_all_or_nothing(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    assert await index.take_lease(lease("l", 100), [SOURCE, A]) == [A]
    assert await index.count_leases(None, 50) == 0
    assert not await index.release_lease("l")


async def test_only_a_living_lease_is_renewed(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    await index.take_lease(lease("l", 100), [SOURCE])
    assert await index.renew_lease("l", 200, 50) == lease("l", 200)
    assert await index.renew_lease("l", 300, 200) is None
    assert await index.renew_lease("other", 300, 50) is None


async def test_a_lease_that_is_asked_for_again_counts_once(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    for _ in range(2):
        assert await index.take_lease(lease("l", 100), [SOURCE]) == []
    assert await index.count_leases(SOURCE, 50) == await index.count_leases(None, 50) == 1
    assert await index.release_lease("l")
    assert await index.count_leases(SOURCE, 50) == 0


async def test_RED_10_a_release_sent_twice_keeps_the_other_holder(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    for holder in ("one", "two"):
        await index.take_lease(lease(holder, 100), [PICTURE.digest])
    assert [await index.release_lease("one") for _ in range(3)] == [True, False, False]
    assert await index.count_leases(PICTURE.digest, 50) == 1
    assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is None


async def test_a_renewed_lease_holds_its_content_longer(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    await index.take_lease(lease("l", 100), [SOURCE])
    await index.renew_lease("l", 200, 50)
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 150) is None
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 200) == [BlobName(Kind.SOURCE, SOURCE)]


async def test_what_a_run_holds_is_counted_once_with_its_size(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    await index.write_object(CLIP, ALIAS, 1)
    await index.write_segment(SEGMENT, 1)
    await index.take_lease(lease("one", 100), [SOURCE, CLIP.digest])
    await index.take_lease(lease("two", 200), [CLIP.digest, KEY])
    await index.take_lease(Lease("other", "owner", "another run", 200), [SOURCE])
    assert await index.held("run", 50) == {SOURCE: 7, CLIP.digest: 2 * 4 * 3 * 3, KEY: 1000}
    assert await index.held("run", 150) == {CLIP.digest: 2 * 4 * 3 * 3, KEY: 1000}
    assert await index.held("no run", 50) == {}


async def test_blobs_of_leased_units_are_held(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    await index.write_object(CLIP, ALIAS, 1)
    await index.write_object(PICTURE, digest("other"), 1)
    await index.write_segment(SEGMENT, 1)
    names = [
        BlobName(Kind.FRAME, A),
        BlobName(Kind.FRAME, B),
        BlobName(Kind.MANIFEST, PICTURE.digest),
        BlobName(Kind.SEGMENT, KEY),
        BlobName(Kind.SOURCE, SOURCE),
    ]
    assert await index.held_blobs(names, 50) == set()
    await index.take_lease(lease("l", 100), [PICTURE.digest])
    assert await index.held_blobs(names, 50) == {names[0], names[2], names[3]}
    await index.take_lease(lease("m", 100), [CLIP.digest, SOURCE])
    assert await index.held_blobs(names, 50) == set(names)
    assert await index.held_blobs(names, 100) == set()


async def test_an_alias_may_move_and_outlives_its_first_object(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    await index.write_object(CLIP, ALIAS, 1)
    assert await index.find_alias(ALIAS) == CLIP.digest
    await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50)
    assert await index.find_alias(ALIAS) == CLIP.digest
    await index.forget(Entry(Unit.OBJECT, CLIP.digest), 50)
    assert await index.find_alias(ALIAS) is None


async def test_the_most_recently_used_objects_come_first(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    await index.write_object(CLIP, None, 2)
    assert await index.recent(10) == [CLIP.digest, PICTURE.digest]
    await index.touch({Entry(Unit.OBJECT, PICTURE.digest): 3})
    assert await index.recent(1) == [PICTURE.digest]
    assert await index.count_objects() == 2


async def test_one_owner_flies_and_a_dead_one_is_followed(index: Index) -> None:
    assert await index.take_flight(KEY, "a", 1000, 0) is Claim.OURS
    assert await index.take_flight(KEY, "a", 2000, 500) is Claim.OURS  # prolonged
    assert await index.take_flight(KEY, "b", 3000, 1500) is Claim.OTHERS
    await index.end_flight(KEY, "b")  # not b's
    assert await index.take_flight(KEY, "b", 3000, 1500) is Claim.OTHERS
    await index.end_flight(KEY, "a")
    assert await index.take_flight(KEY, "b", 2020, 2000) is Claim.OURS
    async with asyncio.timeout(10):  # Redis ends a flight by its own clock
        while await index.take_flight(KEY, "c", 2040, 2020) is Claim.OTHERS:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await index.end_flight(KEY, "c")
    await index.write_segment(SEGMENT, 1)
    assert await index.take_flight(KEY, "c", 3000, 2020) is Claim.KNOWN
    await index.write_object(PICTURE, ALIAS, 1, (SOURCE, 7))
    assert await index.take_flight(ALIAS, "c", 3000, 2020) is Claim.KNOWN
    assert await index.has_source(SOURCE)


async def test_a_claim_for_what_is_not_known_writes_nothing_for_what_is(index: Index) -> None:
    assert await index.take_flight(ALIAS, "a", 60_000, 0, unless_known=True) is Claim.OURS
    assert await index.take_flight(ALIAS, "b", 60_000, 0, unless_known=True) is Claim.OTHERS
    await index.write_object(PICTURE, ALIAS, 1, (SOURCE, 7))
    assert await index.take_flight(ALIAS, "b", 60_000, 0, unless_known=True) is Claim.KNOWN
    assert await index.take_flight(ALIAS, "c", 60_000, 0) is Claim.KNOWN  # neither a nor b holds it any more
    assert await index.take_flight(ALIAS, "b", 60_000, 0) is Claim.OTHERS


async def test_what_is_written_ends_its_claim(index: Index) -> None:
    for key, write in (
        (ALIAS, index.write_object(PICTURE, ALIAS, 1)),
        (KEY, index.write_segment(SEGMENT, 1)),
    ):
        assert await index.take_flight(key, "a", 60_000, 0) is Claim.OURS
        await write
        assert await index.take_flight(key, "b", 60_000, 0) is Claim.KNOWN


async def test_an_object_is_found_by_its_alias(index: Index) -> None:
    assert await index.find_object(ALIAS) is None
    await index.write_object(CLIP, ALIAS, 1)
    assert await index.find_object(ALIAS) == CLIP


async def test_a_store_is_known_once_it_is_marked(index: Index) -> None:
    assert not await index.memory("disk")
    assert await index.mark_store("disk", await index.begin_telling())
    memory = await index.memory("disk")
    assert memory
    assert not await index.memory("another")
    assert await index.mark_store(
        "disk", await index.begin_telling()
    )  # by a second service of the same store
    assert await index.memory("disk") == memory


async def test_concurrent_holders_are_counted_right(index: Index) -> None:
    await index.write_object(PICTURE, ALIAS, 1)
    names = [f"l{i}" for i in range(64)]
    await asyncio.gather(*(index.take_lease(lease(name, 100), [PICTURE.digest]) for name in names))
    assert await index.count_leases(PICTURE.digest, 50) == 64
    released = await asyncio.gather(*(index.release_lease(name) for name in names[:-1] * 2))
    assert sum(released) == 63
    assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is None
    await index.release_lease(names[-1])
    assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is not None


async def test_sync_returns(index: Index) -> None:
    await index.write_source(SOURCE, 7, 1)
    await index.sync()
    assert await index.has_source(SOURCE)


async def test_sqlite_keeps_everything_over_a_restart(tmp_path: Path) -> None:
    first = SqliteIndex(tmp_path / "i")
    await first.write_object(PICTURE, ALIAS, 1)
    await first.take_lease(lease("l", 100), [PICTURE.digest])
    await first.close()
    second = SqliteIndex(tmp_path / "i")
    assert await second.read_object(PICTURE.digest) == PICTURE
    assert await second.count_leases(PICTURE.digest, 50) == 1
    await second.close()


async def test_sqlite_is_shared_by_two_processes_at_once(tmp_path: Path) -> None:
    one, two = SqliteIndex(tmp_path / "i"), SqliteIndex(tmp_path / "i")
    await asyncio.gather(
        *(index.write_source(digest(f"s{i}"), 1, i) for i in range(50) for index in (one, two))
    )
    await one.take_lease(lease("l", 100), [digest("s1")])
    assert await two.count_leases(digest("s1"), 50) == 1
    assert len(await two.idle(50, 100)) == 49
    await one.close()
    await two.close()


async def test_sqlite_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    made = SqliteIndex(tmp_path / "i")
    await made.write_object(CLIP, ALIAS, 1)
    await made.close()
    with sqlite3.connect(tmp_path / "i") as db:
        db.executescript(
            "DROP INDEX leases_by_end; DROP INDEX leases_by_run; DROP TABLE flights; DROP TABLE stores;"
            "ALTER TABLE objects DROP COLUMN bytes; ALTER TABLE sources DROP COLUMN bytes; PRAGMA user_version = 1;"
        )
    db.close()
    again = SqliteIndex(tmp_path / "i")
    await again.take_lease(lease("l", 100), [CLIP.digest])
    assert await again.held("run", 50) == {CLIP.digest: CLIP.bytes}
    await again.close()
