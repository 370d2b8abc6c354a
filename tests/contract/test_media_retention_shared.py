"""Two services over one store and index; an index that loses entries or all of its memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.address.contract import clip, still
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Kind, SegmentRecord
from omnifleet_media.server.flights import Flights
from omnifleet_media.server.library import Library
from tests.chaos.media_light import InstantDecoder, everything_is_whole, light_library, source_of
from tests.support_redis import RedisServer, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    server.ask("FLUSHALL")
    return server


@pytest.fixture(params=["sqlite", "redis"])
def index(request: pytest.FixtureRequest) -> str:
    """The setting `media.index`."""
    return "sqlite" if request.param == "sqlite" else request.getfixturevalue("redis").url


@asynccontextmanager
async def two(folder: Path, index: str, *decoders: InstantDecoder) -> AsyncIterator[list[Library]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(light_library(folder, decoder, index=index))
            for decoder in decoders or (InstantDecoder(), InstantDecoder())
        ]


async def put(library: Library, seed: int) -> Digest:
    return (await library.put(source_of(seed), still(), durable=False)).item.digest


async def pixels(library: Library, digest: Digest) -> bytes:
    item = await library.read(digest)
    return bytes(await library.open(Kind.FRAME, item.frames[0]))


async def test_one_service_decodes_and_the_other_waits(tmp_path: Path, index: str) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        started.set()
        await go_on.wait()

    decoders = InstantDecoder(slowly), InstantDecoder()
    async with two(tmp_path, index, *decoders) as (one, other):
        first = asyncio.create_task(one.put(source_of(1), still(), durable=False))
        await started.wait()
        second = asyncio.create_task(other.put(source_of(1), still(), durable=False))
        assert not (await asyncio.wait((second,), timeout=0.1))[0]
        go_on.set()
        assert (await first).decoded and not (await second).decoded
        assert [decoder.decodes for decoder in decoders] == [1, 0]
        assert await pixels(other, (await second).item.digest) == source_of(1).data


async def test_a_failed_decode_is_tried_by_the_one_who_waited(tmp_path: Path, index: str) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        started.set()
        await go_on.wait()
        raise OmnifleetError(Reason.OVERLOADED, "no", retryable=True)

    async with two(tmp_path, index, InstantDecoder(fail), InstantDecoder()) as (one, other):
        first = asyncio.create_task(put(one, 1))
        await started.wait()
        second = asyncio.create_task(put(other, 1))
        go_on.set()
        with pytest.raises(OmnifleetError, match="overloaded"):
            await first
        assert await pixels(other, await second) == source_of(1).data


_HANG = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from omnifleet_media.address.contract import clip, still
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.server.flights import Flights
from tests.chaos.media_light import InstantDecoder, light_library, source_of

async def hang():
    print("decoding", flush=True)
    await asyncio.sleep(3600)

async def main():
    async with light_library(Path(sys.argv[2]), InstantDecoder(hang), index=sys.argv[3]) as library:
        library._flights = Flights(library.index, claim_ms=1500)
        await library.put(source_of(1), still(), durable=False)

asyncio.run(main())
"""


def test_the_flight_of_a_killed_service_is_taken_over(tmp_path: Path, index: str) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _HANG, root, str(tmp_path), index]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "decoding\n"
        child.kill()
    asyncio.run(_take_over(tmp_path, index))


async def _take_over(folder: Path, index: str) -> None:
    decoder = InstantDecoder()
    async with light_library(folder, decoder, index=index) as library, asyncio.timeout(60):
        assert await pixels(library, await put(library, 1)) == source_of(1).data
        assert decoder.decodes == 1
        await everything_is_whole(library)


async def test_a_claim_is_prolonged_while_its_owner_lives(tmp_path: Path, index: str) -> None:
    async with two(tmp_path, index) as (one, other):
        key, makers = Digest("f" * 64), []

        async def find() -> SegmentRecord | None:
            return await one.index.read_segment(key)

        async def make() -> SegmentRecord:
            makers.append("x")
            await asyncio.sleep(1.0)  # longer than the claim
            made = SegmentRecord(key, key, key, 1, (1, 2, 2), 1, key)
            await one.index.write_segment(made, 1)
            return made

        flights = [Flights(library.index, claim_ms=300) for library in (one, other)]
        results = await asyncio.gather(*(flight.find_or_make(key, find, make) for flight in flights))
        assert sorted(made for _, made in results) == [False, True]
        assert len(makers) == 1


class SlowProcessor:
    """Makes a segment of one byte when it is let."""

    def __init__(self) -> None:
        self.started, self.go_on, self.made = asyncio.Event(), asyncio.Event(), 0

    async def call(self, work: object, pixels: object) -> tuple[dict[str, Any], bytes]:
        self.started.set()
        await self.go_on.wait()
        self.made += 1
        return {"token_count": 1, "grid": [1, 2, 2]}, b"x"

    async def close(self) -> None:
        """Nothing to end."""


async def test_one_service_preprocesses_and_the_other_waits(tmp_path: Path, index: str) -> None:
    name = "Qwen2VLImageProcessor"
    one_makes, other_makes = SlowProcessor(), SlowProcessor()
    settings = {"index": index, "processors": (name,)}
    async with (
        light_library(tmp_path, processor=one_makes, **settings) as one,
        light_library(tmp_path, processor=other_makes, **settings) as other,
    ):
        ref = (await one.put(source_of(1), still(), durable=False)).item.ref
        first = asyncio.create_task(one.segments.find_or_make(ref, name, "{}", ""))
        await one_makes.started.wait()
        second = asyncio.create_task(other.segments.find_or_make(ref, name, "{}", ""))
        assert not (await asyncio.wait((second,), timeout=0.1))[0]
        one_makes.go_on.set()
        assert [made for _, made in await asyncio.gather(first, second)] == [True, False]
        assert (one_makes.made, other_makes.made) == (1, 0)


_PREPROCESS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from omnifleet.types import Digest, MediaKind, MediaRef
from tests.chaos.media_light import light_library

class Processor:
    async def call(self, work, pixels):
        print("makes", flush=True)
        await asyncio.sleep(0.2)
        return {"token_count": 1, "grid": [1, 2, 2]}, b"x"

    async def close(self):
        pass

async def main():
    name, refs = "Qwen2VLImageProcessor", [MediaRef(MediaKind.IMAGE, Digest(d)) for d in sys.argv[4:]]
    async with light_library(Path(sys.argv[2]), processor=Processor(), index=sys.argv[3], processors=(name,)) as library:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for ref in refs:
            record, made = await library.segments.find_or_make(ref, name, "{}", "")
            print(record.key, made, flush=True)

asyncio.run(main())
"""


def test_processes_that_ask_at_once_preprocess_once(tmp_path: Path, index: str) -> None:
    digests = asyncio.run(_six_pictures(tmp_path, index))
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _PREPROCESS, root, str(tmp_path), index, *digests]
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        children = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        told = [child.stdout.read().splitlines() for child in children]
    makes = sum(lines.count("makes") for lines in told)
    keys = [[line.split()[0] for line in lines if line != "makes"] for lines in told]
    assert makes == len(digests)
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(digests)
    assert sum(line.endswith("True") for lines in told for line in lines) == len(digests)


async def _six_pictures(folder: Path, index: str) -> list[Digest]:
    async with light_library(folder, index=index) as library:
        return [await put(library, seed) for seed in range(6)]


async def test_one_service_evicts_nothing_that_the_other_leased(tmp_path: Path, index: str) -> None:
    async with two(tmp_path, index) as (one, other):
        kept, gone = await put(one, 1), await put(one, 2)
        await one.retention.take_lease("run", "owner", 60_000, [kept])
        await other.retention.collect(0, dry_run=False)
        assert await pixels(one, kept) == source_of(1).data
        with pytest.raises(OmnifleetError) as caught:
            await other.read(gone)
        assert caught.value.reason is Reason.NOT_FOUND
        await everything_is_whole(one)


async def test_an_evictor_waits_for_a_writer_that_relies_on_a_shared_frame(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path, index) as (one, other):
        await one.put(source_of(1, 2), clip("uniform@1", 0, 0.0, 1), durable=False)
        written, go_on = asyncio.Event(), asyncio.Event()
        real = one.index.write_object

        async def late(item: MediaObject, *rest: Any) -> None:
            written.set()
            await go_on.wait()
            await real(item, *rest)

        monkeypatch.setattr(one.index, "write_object", late)
        writing = asyncio.create_task(put(one, 1))  # the frame is there: it is not written again
        await written.wait()
        evicting = asyncio.create_task(other.retention.collect(0, dry_run=False))
        assert not (await asyncio.wait((evicting,), timeout=0.3))[0]
        go_on.set()
        await writing
        await evicting  # it may take the picture too, but as a whole
        await everything_is_whole(one)


async def test_writers_and_evictors_of_two_services_never_break_a_promise(tmp_path: Path, index: str) -> None:
    """Both store and evict what shares frames: an object that the index knows always has its bytes."""
    async with two(tmp_path, index) as (one, other):

        async def store(library: Library, base: int) -> None:
            for i in range(25):
                await put(library, (base + i) % 5)

        async def evict(library: Library) -> None:
            for _ in range(25):
                await library.retention.collect(0, dry_run=False)

        await asyncio.gather(store(one, 0), store(other, 2), evict(one), evict(other))
        await everything_is_whole(one)
        await everything_is_whole(other)


async def test_RED_01_entries_deleted_by_hand_are_told_anew_or_cleanly_lost(
    tmp_path: Path, redis: RedisServer
) -> None:
    async with light_library(tmp_path, index=redis.url) as library:
        made = [await put(library, seed) for seed in range(10)]
        for digest in made[:3]:
            redis.ask("DEL", f"omnifleet:o:{digest}")
        for seed, digest in enumerate(made):
            assert await pixels(library, digest) == source_of(seed).data
        for digest in made[:3]:
            library.store.remove(Kind.FRAME, (await library.read(digest)).frames[0])
        lost = 0
        for digest in made:
            try:
                await pixels(library, digest)
            except OmnifleetError as error:
                assert error.reason is Reason.MEDIA_LOST
                lost += 1
        assert lost == 3
        for seed in range(3):  # and brought again, they are here again
            assert await pixels(library, await put(library, seed)) == source_of(seed).data


async def test_RED_03_an_emptied_index_is_told_what_the_disk_holds(
    tmp_path: Path, redis: RedisServer
) -> None:
    decoder = InstantDecoder()
    async with light_library(tmp_path, decoder, index=redis.url) as library:
        made = [await put(library, seed) for seed in range(20)]
        redis.ask("FLUSHALL")
        with pytest.raises(
            OmnifleetError
        ) as caught:  # nothing is called lost, or an orphan, before it is told
            await library.read(Digest("0" * 64))
        assert (caught.value.reason, caught.value.retryable) == (Reason.UNAVAILABLE, True)
        with pytest.raises(OmnifleetError, match="lost its memory"):
            await library.retention.collect(1 << 40, dry_run=False)
        with pytest.raises(OmnifleetError, match="lost its memory"):
            await library.retention.take_lease("run", "owner", 1000, [made[0]])
        assert await pixels(library, made[0]) == source_of(0).data  # by id, at once
        assert await library.recovery.recover() == 19
        for seed, digest in enumerate(made):
            assert await pixels(library, digest) == source_of(seed).data
            assert await put(library, seed) == digest  # by content
        assert decoder.decodes == 20
        assert await library.recovery.recover() == 0
        await everything_is_whole(library)


async def test_RED_03_orphans_of_a_lost_index_are_reclaimed(tmp_path: Path, redis: RedisServer) -> None:
    async with light_library(tmp_path, index=redis.url) as library:
        digest = await put(library, 1)
        path = library.store.disk.path(Kind.MANIFEST, digest)
        path.unlink()
        redis.ask("FLUSHALL")
        await library.recovery.recover()
        with pytest.raises(OmnifleetError) as caught:
            await library.read(digest)
        assert caught.value.reason is Reason.NOT_FOUND
        assert (await library.retention.collect(1 << 40, dry_run=False)).orphans == 2  # frame and source


async def test_RED_08_a_blob_that_goes_between_two_steps_is_a_clean_miss(tmp_path: Path, index: str) -> None:
    async with light_library(tmp_path, index=index) as library:
        digest = await put(library, 1)
        frame = (await library.read(digest)).frames[0]
        hits = 0
        for i in range(1_000):
            blob = await library.blob(Kind.FRAME, frame)
            removing = asyncio.create_task(asyncio.to_thread(library.store.remove, *blob.key))
            if i % 3 == 0:
                await removing
            try:
                assert bytes(await asyncio.to_thread(library.store.open, blob)) == source_of(1).data
                hits += 1
            except OmnifleetError as error:
                assert error.reason is Reason.MEDIA_LOST
            await removing
            await put(library, 1)
        assert hits < 1_000


async def test_a_store_of_the_first_version_has_manifests_alone(tmp_path: Path, redis: RedisServer) -> None:
    async with light_library(tmp_path, index=redis.url) as library:
        digest = await put(library, 1)
        manifest = (await library.read(digest)).manifest
        assert bytes(await library.open(Kind.MANIFEST, digest)) == manifest  # readers see the manifest alone
        path = library.store.disk.path(Kind.MANIFEST, digest)
        path.chmod(0o600)
        path.write_bytes(manifest)
        redis.ask("FLUSHALL")
        assert await library.recovery.recover() == 0
        assert await pixels(library, await put(library, 1)) == source_of(1).data
