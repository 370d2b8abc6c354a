"""Tiers: whole files or none, budgets, checks on the way up, leftovers of the dead."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from omnifleet import huge_pages
from omnifleet.address import digest_bytes
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.address.contract import still
from omnifleet_media.store import files
from omnifleet_media.store.blob import Blob, Pack
from omnifleet_media.store.disk import DiskTier
from omnifleet_media.store.gate import Gate
from omnifleet_media.store.shared import SharedTier
from omnifleet_media.store.tiers import Policy, Store
from tests.chaos.media_light import light_library, source_of


def blob_of(data: bytes) -> Blob:
    digest = digest_bytes(data, "tensors")
    return Blob("segment", digest, digest, lambda view: digest_bytes(view, "tensors"))


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Store(DiskTier(tmp_path / "blobs"), SharedTier(tmp_path / "shm", 1000))
    yield made
    made.close()


def put(store: Store, data: bytes) -> Blob:
    blob = blob_of(data)
    store.write([(blob, data)])
    return blob


def test_bytes_come_back_from_every_tier(store: Store) -> None:
    blob = put(store, b"hello")
    assert bytes(store.open(blob)) == b"hello"
    assert store.tiers(blob) == ["memory", "shared_memory", "disk"]
    path = store.map_path(blob)
    assert path is not None
    assert path.read_bytes() == b"hello"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_maps_can_not_be_written(store: Store) -> None:
    view = store.open(put(store, b"hello"))
    with pytest.raises(TypeError):
        view[0] = 0


def test_shared_memory_keeps_its_budget_and_disk_keeps_everything(store: Store) -> None:
    blobs = [put(store, bytes([i]) * 400) for i in range(3)]
    assert store.shared.used == 800
    assert store.shared.path(blobs[0]) is None
    assert store.map_path(blobs[0]) is not None  # promoted again, at the cost of the oldest
    assert store.shared.path(blobs[1]) is None
    assert store.disk.used == 1200


def test_what_does_not_fit_shared_memory_is_read_from_disk(store: Store) -> None:
    blob = put(store, bytes(2000))
    assert store.map_path(blob) is None
    assert len(store.open(blob)) == 2000
    assert store.shared.refused == 2


def test_a_full_shared_memory_makes_room_and_then_gives_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(store, bytes(300))
    real = os.write
    full = {"until_gone": store.shared.path(first)}

    def write(fd: int, data: memoryview) -> int:
        if "shm" in os.readlink(f"/proc/self/fd/{fd}") and full["until_gone"].exists():
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(files.os, "write", write)
    second = put(store, bytes(301))
    assert store.shared.path(first) is None
    assert store.shared.path(second) is not None


def test_a_cleared_shared_memory_costs_speed_only(store: Store, tmp_path: Path) -> None:
    first = put(store, b"hello")
    shutil.rmtree(next((tmp_path / "shm").iterdir()))
    assert bytes(store.open(put(store, b"world"))) == b"world"
    assert bytes(store.open(first)) == b"hello"


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "write", write)
    with pytest.raises(OmnifleetError) as caught:
        put(store, b"hello")
    assert (caught.value.reason, caught.value.knob) == (Reason.DISK_FULL, "media.store")
    assert not [p for p in (tmp_path / "blobs").rglob(blob_of(b"hello").digest)]
    assert not list((tmp_path / "blobs").rglob(".part-*"))
    assert store.disk.used == 0


def test_a_flipped_bit_on_disk_is_never_served(store: Store) -> None:
    blob = put(store, b"hello")
    store.shared.remove(*blob.key)
    path = store.disk.path(*blob.key)
    path.chmod(0o600)
    path.write_bytes(b"hellp")
    with pytest.raises(OmnifleetError) as caught:
        store.open(blob)
    assert caught.value.reason is Reason.CORRUPT
    with pytest.raises(OmnifleetError) as caught:
        store.open(blob)
    assert caught.value.reason is Reason.MEDIA_LOST
    assert bytes(store.open(put(store, b"hello"))) == b"hello"


def test_readers_keep_their_map_when_a_blob_goes(store: Store) -> None:
    blob = put(store, b"hello")
    view = store.open(blob)
    store.remove(*blob.key)
    assert bytes(view) == b"hello"


def test_a_store_counts_what_it_finds_and_clears_what_was_half_written(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    disk.write(blob_of(b"hello"), b"hello")
    disk.close()
    dead = tmp_path / "incoming" / "writer-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / ".part-1").write_bytes(b"hal")
    (tmp_path / "usage").write_bytes(bytes([99] * 8))  # whatever a killed writer left
    again = DiskTier(tmp_path)
    assert again.used == 5
    assert not dead.exists()
    assert again.id
    again.close()


def test_services_share_a_store_and_its_count(tmp_path: Path) -> None:
    one, two = DiskTier(tmp_path), DiskTier(tmp_path)
    one.write(blob_of(b"hello"), b"hello")
    two.write(blob_of(b"hello"), b"hello")
    two.write(blob_of(b"worlds"), b"worlds")
    assert one.used == two.used == 11
    assert one.id == two.id
    assert one.remove(*blob_of(b"worlds").key) == 6
    assert two.remove(*blob_of(b"worlds").key) == 0
    assert two.used == 5
    one.close()
    three = DiskTier(tmp_path)  # not alone: it takes the count as it is
    assert three.used == 5
    two.close()
    three.close()


def test_two_writers_of_one_blob_count_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = DiskTier(tmp_path), DiskTier(tmp_path)
    blob = blob_of(b"hello")
    real = os.link

    def link(source: Path, target: Path) -> None:
        monkeypatch.setattr(files.os, "link", real)
        two.write(blob, b"hello")  # overtakes at the last moment
        real(source, target)

    monkeypatch.setattr(files.os, "link", link)
    one.write(blob, b"hello")
    assert one.used == 5
    assert bytes(two.open(blob)) == b"hello"
    one.close()
    two.close()


async def test_a_remover_waits_for_writers_and_is_not_overtaken(tmp_path: Path) -> None:
    gate, other = Gate(tmp_path), Gate(tmp_path)
    seen: list[str] = []
    first_in, first_out = asyncio.Event(), asyncio.Event()

    async def write(name: str, inside: asyncio.Event, until: asyncio.Event) -> None:
        async with gate.writing():
            seen.append(name)
            inside.set()
            await until.wait()

    async def remove() -> None:
        async with other.removing():
            seen.append("removed")

    one = asyncio.create_task(write("one", first_in, first_out))
    await first_in.wait()
    async with gate.writing():  # writers pass together
        pass
    removing = asyncio.create_task(remove())
    while not _locked(tmp_path / "turn"):  # noqa: ASYNC110 - the remover has its turn, it is next
        await asyncio.sleep(0)
    done = asyncio.Event()
    done.set()
    late = asyncio.create_task(write("late", asyncio.Event(), done))
    for _ in range(20):
        await asyncio.sleep(0)
    assert seen == ["one"]
    first_out.set()
    await asyncio.gather(one, removing, late)
    assert seen == ["one", "removed", "late"]


def _locked(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


async def test_a_cancelled_writer_lets_the_gate_go(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    async with gate.writing():
        waiting = asyncio.create_task(_pass(gate))
        while not _locked(tmp_path / "turn"):  # noqa: ASYNC110 - no event tells of a file lock
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(10):
        await _pass(gate)


async def _pass(gate: Gate) -> None:
    async with gate.removing():
        pass


def test_a_blob_that_readers_mark_stays_in_shared_memory(store: Store) -> None:
    first, second = put(store, bytes([1]) * 400), put(store, bytes([2]) * 400)
    path = store.shared.path(first)
    assert path is not None
    store.shared.path(second)  # the service itself used the second one last
    os.utime(path, ns=(2**62, 2**62))
    put(store, bytes([3]) * 400)
    assert store.shared.path(first) is not None
    assert store.shared.path(second) is None


def test_bytes_that_changed_in_shared_memory_are_not_served(store: Store) -> None:
    blob = put(store, b"hello")
    path = store.shared.path(blob)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"hellp")
    assert bytes(store.open(blob)) == b"hello"
    assert not path.exists()


def test_other_users_may_map_only_where_it_is_said(tmp_path: Path) -> None:
    tier = SharedTier(tmp_path, 100, for_everyone=True)
    blob = blob_of(b"hello")
    path = tier.write(blob, memoryview(b"hello"))
    assert path is not None
    assert [stat.S_IMODE(p.stat().st_mode) for p in (tier.root, path.parent, path)] == [0o755, 0o755, 0o444]
    tier.close()


@pytest.mark.parametrize(
    ("share", "alone", "clip", "segment"),
    [("auto", True, False, True), ("put", True, False, True), ("read", False, False, False)],
)
def test_a_put_shares_what_the_policy_says(
    tmp_path: Path, share: Literal["auto", "put", "read"], alone: bool, clip: bool, segment: bool
) -> None:
    store = Store(
        DiskTier(tmp_path / "blobs"), SharedTier(tmp_path / "shm", 1000), policy=Policy(share=share)
    )
    picture, *frames = (replace(blob_of(data), kind="frame") for data in (b"picture", b"one", b"two"))
    tensors = blob_of(b"tensors")
    store.write([(picture, b"picture")])
    store.write([*zip(frames, (b"one", b"two"), strict=True), (tensors, b"tensors")])
    found = [store.shared.path(blob) is not None for blob in (picture, *frames, tensors)]
    assert found == [alone, clip, clip, segment]
    assert all(store.map_path(blob) for blob in frames)
    store.close()


@pytest.mark.parametrize(("share", "kinds"), [("auto", []), ("put", ["object"]), ("read", [])])
async def test_a_clip_enters_shared_memory_as_one_file_when_the_policy_says(
    tmp_path: Path, share: str, kinds: list[str]
) -> None:
    async with light_library(tmp_path, shared_memory_when=share) as library:
        item = (await library.put(source_of(1, 2), still(), durable=False)).item
        root = library.store.shared.root
        assert [path.name for path in root.iterdir() if path.is_dir()] == kinds
        assert await library.map_frames(item) == str(root / "object" / item.digest)


def test_content_enters_shared_memory_when_the_policy_says(tmp_path: Path) -> None:
    disk, shared = DiskTier(tmp_path / "blobs"), SharedTier(tmp_path / "shm", 1000)
    store = Store(disk, shared, policy=Policy(share="read"))
    blob = put(store, b"hello")
    assert shared.path(blob) is None
    assert store.map_path(blob) is not None
    assert shared.path(blob) is not None
    store.close()


def test_folders_of_dead_services_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    living = SharedTier(tmp_path, 10)
    dead = tmp_path / "omnifleet-media-dead"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    other = SharedTier(tmp_path, 10)
    assert not dead.exists()
    assert len(list(tmp_path.iterdir())) == 2
    for tier in (living, other):
        tier.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_what_tells_the_living(tmp_path: Path) -> None:
    folder = tmp_path / "omnifleet-media-held"
    folder.mkdir(mode=0o700)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        SharedTier(tmp_path, 10).close()
        assert folder.exists()


# ---------------------------------------------------------------------- packs


def pack_of(blobs: list[Blob], size: int) -> Pack:
    return Pack(
        "object", digest_bytes(b"all", "media"), blobs, b"tail", size + 4, [blob.key for blob in blobs]
    )


def test_a_pack_is_its_blobs_and_goes_with_any_of_them(store: Store) -> None:
    blobs = [put(store, data) for data in (b"one", b"three")]
    pack = pack_of(blobs, 8)
    path = store.map_pack(pack)
    assert path is not None
    assert path.read_bytes() == b"onethreetail"
    assert store.map_pack(pack) == path
    assert store.shared.used == 8 + 12
    store.remove(*blobs[1].key)
    assert not path.exists()
    assert store.shared.used == 3
    put(store, b"three")
    assert store.map_pack(pack) == path
    store.shared.remove(*pack.key)
    assert (store.shared._packs, store.shared.used) == ({}, 8)


def test_a_pack_that_lacks_a_blob_is_not_made(store: Store) -> None:
    blobs = [put(store, data) for data in (b"one", b"three")]
    store.remove(*blobs[1].key)
    with pytest.raises(OmnifleetError) as caught:
        store.map_pack(pack_of(blobs, 8))
    assert caught.value.reason is Reason.MEDIA_LOST
    assert store.shared.used == 3
    assert not list(store.shared.root.glob(f"{files.SCRATCH}*"))


@pytest.mark.parametrize("huge", [True, False])
def test_large_files_are_whole_with_and_without_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    if not huge:
        monkeypatch.setattr(huge_pages, "_COLLAPSE", -1)  # as an older kernel answers
    data = bytes(range(256)) * ((2 * huge_pages.HUGE + 4096) // 256)
    base = Path("/dev/shm") if huge and os.access("/dev/shm", os.W_OK) else tmp_path
    tier = SharedTier(base / f"om-test-{os.getpid()}", 8 << 20)
    try:
        path = tier.write(blob_of(data), memoryview(data))
        assert path is not None
        with path.open("rb") as file:
            view = huge_pages.map_file(file.fileno(), len(data))
        assert view.readonly
        assert view == data
    finally:
        tier.close()
        tier.root.parent.rmdir()
