"""Tiers: whole files or none, budgets, checks on the way up, leftovers of the dead."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from omnifleet.address import digest_bytes
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.store import files
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.disk import DiskTier
from omnifleet_media.store.shared import SharedTier
from omnifleet_media.store.tiers import Store


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
    assert [p for p in (tmp_path / "blobs").rglob("*") if p.is_file()] == [tmp_path / "blobs" / "lock"]
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


def test_what_is_being_written_is_not_removed(store: Store) -> None:
    blob = put(store, b"hello")
    with store.pinned([blob]):
        assert store.remove(*blob.key) == 0
        assert store.has(blob)
    assert store.remove(*blob.key) == 5
    assert not store.has(blob)


def test_readers_keep_their_map_when_a_blob_goes(store: Store) -> None:
    blob = put(store, b"hello")
    view = store.open(blob)
    store.remove(*blob.key)
    assert bytes(view) == b"hello"


def test_a_store_counts_what_it_finds_and_clears_what_was_half_written(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    disk.write(blob_of(b"hello"), b"hello")
    (tmp_path / "incoming" / ".part-1-1").write_bytes(b"hal")
    disk.close()
    again = DiskTier(tmp_path)
    assert again.used == 5
    assert not list((tmp_path / "incoming").iterdir())
    again.close()


def test_two_services_can_not_share_a_store(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    with pytest.raises(OmnifleetError) as caught:
        DiskTier(tmp_path)
    assert (caught.value.reason, caught.value.knob) == (Reason.CONFLICT, "media.store")
    disk.close()


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
