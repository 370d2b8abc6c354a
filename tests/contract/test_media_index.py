"""What every implementation of the index port does. Another implementation joins by a line in INDEXES."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import BlobName, Entry, Index, Kind, SegmentRecord, Unit
from omnifleet_media.index.sqlite import SqliteIndex

INDEXES: dict[str, Callable[[Path], Index]] = {"sqlite": lambda folder: SqliteIndex(folder / "index.sqlite")}


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0"))


A, B, C, ALIAS, SOURCE, KEY = (digest(name) for name in ("a", "b", "c", "alias", "source", "key"))
PICTURE = MediaObject(MediaKind.IMAGE, (A,), 4, 3, facts={"mime": "image/png"})
CLIP = MediaObject(MediaKind.VIDEO, (A, B, A), 4, 3, (0, 100, 200))
SEGMENT = SegmentRecord(KEY, PICTURE.digest, digest("fingerprint"), 24, (1, 8, 12), 1000, digest("content"))


@pytest.fixture(params=INDEXES)
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Index]:
    made = INDEXES[request.param](tmp_path)
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
        await index.write_source(SOURCE, 1)
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
    await index.write_source(SOURCE, 30)
    await index.touch({Entry(Unit.OBJECT, PICTURE.digest): 25, Entry(Unit.SOURCE, SOURCE): 5})
    order = [Entry(Unit.SEGMENT, KEY), Entry(Unit.OBJECT, PICTURE.digest), Entry(Unit.SOURCE, SOURCE)]
    assert await index.idle(100, 10) == order  # a touch never moves a use back
    assert await index.idle(100, 1) == order[:1]


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
    await index.write_source(SOURCE, 1)
    for name in ("one", "two"):
        await index.take_lease(lease(name, 100), [SOURCE, SOURCE])
    assert await index.count_leases(SOURCE, 50) == await index.count_leases(None, 50) == 2
    assert await index.release_lease("one")
    assert not await index.release_lease("one")
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 50) is None
    assert await index.release_lease("two")
    assert await index.forget(Entry(Unit.SOURCE, SOURCE), 50) is not None


async def test_a_lease_is_all_or_nothing(index: Index) -> None:
    await index.write_source(SOURCE, 1)
    assert await index.take_lease(lease("l", 100), [SOURCE, A]) == [A]
    assert await index.count_leases(None, 50) == 0
    assert not await index.release_lease("l")


async def test_only_a_living_lease_is_renewed(index: Index) -> None:
    await index.write_source(SOURCE, 1)
    await index.take_lease(lease("l", 100), [SOURCE])
    assert await index.renew_lease("l", 200, 50) == lease("l", 200)
    assert await index.renew_lease("l", 300, 200) is None
    assert await index.renew_lease("other", 300, 50) is None


async def test_sync_returns(index: Index) -> None:
    await index.write_source(SOURCE, 1)
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
