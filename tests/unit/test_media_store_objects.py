"""The object-store tier below the disk: moved there, brought back, checked on the way; nothing is lost by eviction."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.address.contract import still
from omnifleet_media.index.port import Kind
from omnifleet_media.server.library import Library
from omnifleet_media.store.objects import ObjectTier
from tests.chaos.media_light import FRAME_BYTES, InstantDecoder, everything_is_whole, light_library, source_of


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path / 'bucket'}" if request.param == "file" else f"memory://{uuid4().hex}"


async def put(library: Library, seed: int, *, durable: bool = False) -> Digest:
    return (await library.put(source_of(seed), still(), durable=durable)).item.digest


async def pixels(library: Library, digest: Digest) -> bytes:
    item = await library.read(digest)
    return bytes(await library.open(Kind.FRAME, item.frames[0]))


async def test_what_leaves_the_disk_stays_in_the_object_store(tmp_path: Path, url: str) -> None:
    room = 20 * FRAME_BYTES
    async with light_library(tmp_path, object_store=url, disk_bytes=room, shared_memory_bytes=1) as library:
        made = [await put(library, seed) for seed in range(40)]
        assert library.store.disk.used <= room
        assert library.counters.count("demotions") > 0
        assert library.counters.count("evictions") == 0
        for seed, digest in enumerate(made):
            assert await pixels(library, digest) == source_of(seed).data
        assert "object_store" in library.store.tiers(await library.blob(Kind.MANIFEST, made[0]))


@pytest.mark.parametrize("when", ["put", "durable"])
async def test_leased_content_stays_on_disk(tmp_path: Path, url: str, when: str) -> None:
    async with light_library(tmp_path, object_store=url, object_store_when=when) as library:
        kept, moved = await put(library, 1), await put(library, 2)
        lease = await library.retention.take_lease("run", "owner", 60_000, [kept])
        await library.retention.collect(0, dry_run=False)
        for digest, there in ((kept, True), (moved, False)):
            frame = (await library.read(digest)).frames[0]
            assert library.store.disk.path(Kind.FRAME, frame).exists() is there
        assert await pixels(library, moved) == source_of(2).data
        await library.retention.release_lease(lease.id)
        await library.retention.collect(0, dry_run=False)
        assert library.store.disk.used == 0
        assert await pixels(library, kept) == source_of(1).data


async def test_another_host_finds_what_this_one_stored(tmp_path: Path, url: str) -> None:
    async with light_library(tmp_path / "one", object_store=url) as library:
        digest = await put(library, 1)
    shutil.rmtree(tmp_path / "one")
    decoder = InstantDecoder()
    async with light_library(tmp_path / "other", decoder, object_store=url) as library:
        assert await pixels(library, digest) == source_of(1).data  # by id: index and disk were empty
        assert await put(library, 1) == digest
        assert decoder.decodes == 0
        await everything_is_whole(library)


async def test_a_durable_acknowledgement_means_uploaded(tmp_path: Path, url: str) -> None:
    async with light_library(tmp_path, object_store=url, object_store_when="durable") as library:
        here, there = await put(library, 1), await put(library, 2, durable=True)
        assert library.store.objects is not None
        for digest, uploaded in ((here, False), (there, True)):
            item = await library.read(digest)
            names = [(Kind.MANIFEST, digest), (Kind.FRAME, item.frames[0])]
            blobs = [await library.blob(*name) for name in names]
            assert [library.store.objects.has(blob) for blob in blobs] == [uploaded] * 2


async def test_wrong_bytes_in_the_object_store_are_never_served(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    async with light_library(tmp_path, object_store=f"file://{bucket}", shared_memory_bytes=1) as library:
        digest = await put(library, 1)
        blob = await library.blob(Kind.FRAME, (await library.read(digest)).frames[0])
        library.store.remove(*blob.key)
        path = bucket / Kind.FRAME / blob.digest[:2] / blob.digest
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        with pytest.raises(OmnifleetError) as caught:
            await pixels(library, digest)
        assert caught.value.reason is Reason.CORRUPT
        assert not path.exists()
        with pytest.raises(OmnifleetError) as caught:
            await pixels(library, digest)
        assert caught.value.reason is Reason.MEDIA_LOST
        await put(library, 1)
        assert await pixels(library, digest) == source_of(1).data


async def test_an_object_store_that_fails_is_unavailable_and_loses_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with light_library(tmp_path, object_store=url) as library:
        made = await put(library, 1)
        objects: Any = library.store.objects

        def fail(*_: object, **__: object) -> None:
            raise OSError("the network is down")

        monkeypatch.setattr(objects._fs, "pipe_file", fail)
        with pytest.raises(OmnifleetError) as caught:
            await put(library, 2)
        error = caught.value
        assert (error.reason, error.retryable, error.knob) == (Reason.UNAVAILABLE, True, "media.object_store")
        assert await pixels(library, made) == source_of(1).data
        monkeypatch.undo()
        assert await pixels(library, await put(library, 2)) == source_of(2).data


def test_an_unknown_backend_is_a_setting_to_mend() -> None:
    with pytest.raises(OmnifleetError) as caught:
        ObjectTier("nosuch://bucket", {})
    assert caught.value.reason is Reason.INVALID_CONFIG
    assert "nosuch" in caught.value.message


def test_fsspec_and_redis_are_loaded_only_where_they_are_configured() -> None:
    code = (
        "import sys, omnifleet_media.server.opening; sys.exit(bool({'fsspec', 'redis'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
