"""The media clients: warm reads without a call, bounded caches, what is counted, and the client that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.client.media import MediaClient, SyncMediaClient
from omnifleet.client.media.cache import LocalCache
from omnifleet.client.media.shared import SharedFolder
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import ImageProcessorSpec
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet_media.server.run import Running
from tests.contract.media_world import clip_of_pictures, pixels_of, png, running
from tests.media_files import greys, h264

SIZE = (100, 100)
BYTES = 30_000


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as made:
        yield made


def counted(client: MediaClient, name: str) -> float:
    return client.payload.snapshot().get(name, 0.0)


def ref_of(reply: media_pb2.PutReply) -> MediaRef:
    return MediaRef(MediaKind.VIDEO, Digest(reply.ref.digest))


def messages(client: MediaClient) -> float:
    """Bytes of every message so far."""
    return sum(value for name, value in client.payload.snapshot().items() if name.endswith("/serialized"))


# ---------------------------------------------------------------------- warm reads


async def test_a_warm_read_makes_no_call(service: Running) -> None:
    async with MediaClient.open(service.grpc) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        first = await client.frame(ref)
        before = messages(client)
        assert await client.frame(ref) is first  # kept
        other = await client.put_image(png(1, SIZE), "run")
        before, calls = messages(client), service.library.counters.count("shm_maps")
        mapped = await client.frame(other)  # never read here: found in the shared folder
        assert (mapped == pixels_of(png(1, SIZE))).all()
        assert not mapped.flags.writeable
        assert messages(client) == before
        assert service.library.counters.count("shm_maps") == calls


async def test_all_frames_are_mapped_after_one_call(tmp_path: Path) -> None:
    async with running(tmp_path, shared_memory_when="read") as service:
        item = await clip_of_pictures(service, range(5), SIZE)
        async with MediaClient.open(service.grpc) as client:
            frames = await client.frames(item.ref)
            assert all((f == pixels_of(png(i, SIZE))).all() for i, f in enumerate(frames))
            assert counted(client, "payload_bytes/media_stat/serialized") > 0
            assert counted(client, "payload_bytes/media_get/serialized") == 0
            client.forget()
            asked = messages(client)
            assert (await client.frame(item.ref, 3) == frames[3]).all()
            assert counted(client, "payload_bytes/media_get/serialized") == 0
            assert messages(client) == asked  # nor any other: a clip's file says all
        assert service.library.counters.count("shm_maps") == 5


async def test_what_left_shared_memory_comes_back_by_a_call(service: Running) -> None:
    async with MediaClient.open(service.grpc) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        view = await client.frame(ref)
        digest = (await client.info(ref)).frame_digests[0]
        service.library.store.shared.remove("frame", digest)
        client.forget()
        assert (await client.frame(ref) == view).all()
        assert service.library.store.shared.root.joinpath("frame", digest).exists()


async def test_a_client_finds_the_folder_of_a_new_service(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running(tmp_path) as first:
            client = await stack.enter_async_context(
                MediaClient.open(first.grpc, deadline_s=60, cache_bytes=0)
            )
            refs = [await client.put_image(png(seed, SIZE), "run") for seed in range(2)]
            await client.frame(refs[0])
        async with running(tmp_path, listen=first.grpc) as second:
            for ref in refs:  # from disk, by a call
                await client.frame(ref)
            calls = messages(client)
            for seed, ref in enumerate(refs):  # where the calls have brought them
                assert (await client.frame(ref) == pixels_of(png(seed, SIZE))).all()
            assert messages(client) == calls
            assert second.library.store.shared.root != first.library.store.shared.root


def test_only_a_guarded_folder_of_whole_files_is_mapped(tmp_path: Path) -> None:
    digest, path = "ab" * 32, tmp_path / "shared" / "frame" / ("ab" * 32)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    folder = SharedFolder()
    assert folder.open("frame", digest, 5) is None  # nothing was learnt
    (tmp_path / "shared").chmod(0o777)
    folder.learn(str(path))
    assert folder.open("frame", digest, 5) is None
    (tmp_path / "shared").chmod(0o755)
    folder.learn(str(path))
    assert bytes(folder.open("frame", digest, 5) or b"") == b"12345"
    assert folder.open("frame", digest, 6) is None
    assert folder.open("frame", "../frame/" + digest, 5) is None
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert folder.open("frame", digest, Path("/etc/passwd").stat().st_size) is None


async def test_readers_can_not_change_what_they_map(service: Running) -> None:
    async with MediaClient.open(service.grpc) as client:
        pixels = await client.frame(await client.put_image(png(), "run"))
    with pytest.raises(ValueError, match="WRITEABLE"):
        pixels.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        pixels[0, 0, 0] = 1


async def test_mapped_bytes_are_compared_with_their_digest_on_request(service: Running) -> None:
    async with (
        MediaClient.open(service.grpc, deadline_s=5, cache_bytes=0) as trusting,
        MediaClient.open(service.grpc, deadline_s=5, cache_bytes=0, verify_mapped=True) as careful,
    ):
        ref = await trusting.put_image(png(0, SIZE), "run")
        for client in (trusting, careful):
            assert (await client.frame(ref) == pixels_of(png(0, SIZE))).all()
        path = service.library.store.shared.root / "frame" / (await trusting.info(ref)).frame_digests[0]
        path.chmod(0o600)
        path.write_bytes(bytes(BYTES))  # by the service's own user, past its read-only mode
        assert not (await trusting.frame(ref)).any()
        with pytest.raises(OmnifleetError) as caught:
            await careful.frame(ref)
        assert caught.value.reason is Reason.CORRUPT


async def test_all_frames_of_a_clip_in_order(service: Running) -> None:
    seeds = [3, 1, 2, 1, 0]
    item = await clip_of_pictures(service, seeds, SIZE)
    async with (
        MediaClient.open(service.grpc) as client,
        MediaClient.open(service.grpc, same_host=False) as far,
    ):
        near, away = await client.frames(item.ref), await far.frames(item.ref)
    for seed, a, b in zip(seeds, near, away, strict=True):
        assert (a == pixels_of(png(seed, SIZE))).all()
        assert (a == b).all()
    assert near[1] is near[3]  # equal frames are one


async def test_the_file_of_a_clip_is_believed_only_if_its_address_is_right(service: Running) -> None:
    item = await clip_of_pictures(service, [1, 2, 1], SIZE)
    other = await clip_of_pictures(service, [2, 1], SIZE)
    async with (
        MediaClient.open(service.grpc, deadline_s=5, cache_bytes=0) as trusting,
        MediaClient.open(service.grpc, deadline_s=5, cache_bytes=0, verify_mapped=True) as careful,
    ):
        for client in (trusting, careful):
            for ref in (item.ref, other.ref):
                await client.frames(ref)
        path = service.library.store.shared.root / "object" / item.digest
        whole = path.read_bytes()
        assert len(whole) > 2 * BYTES
        path.chmod(0o600)
        for wrong in (
            (path.parent / other.digest).read_bytes(),
            whole[:-1],
            whole[-4:],
            b"\xff" * len(whole),
        ):
            path.write_bytes(wrong)  # by the service's own user, past its read-only mode
            client = trusting
            client.forget()
            assert [f.tobytes() for f in await client.frames(item.ref)] == [
                pixels_of(png(seed, SIZE)).tobytes() for seed in (1, 2, 1)
            ]
        path.write_bytes(bytes(BYTES) + whole[BYTES:])  # other pixels under the right manifest
        assert not (await trusting.frames(item.ref))[0].any()
        assert ((await careful.frames(item.ref))[0] == pixels_of(png(1, SIZE))).all()


async def test_a_clip_that_is_evicted_or_lost_leaves_shared_memory_whole(service: Running) -> None:
    item = await clip_of_pictures(service, [1, 2], SIZE)
    path = service.library.store.shared.root / "object" / item.digest
    async with MediaClient.open(service.grpc, deadline_s=5) as client:
        kept = await client.frames(item.ref)
        service.library.store.remove("frame", item.frames[1])
        assert not path.exists()
        client.forget()
        with pytest.raises(OmnifleetError) as caught:
            await client.frames(item.ref)
        assert caught.value.reason is Reason.MEDIA_LOST
        await client.put_image(png(2, SIZE), "run")
        assert (await client.frames(item.ref))[1] is not kept[1]
        assert path.exists()
        lease = await client.take_lease([item.digest], "me", "run", 60)
        await client.collect(0)
        assert path.exists()
        await client.release_lease(lease)
        await client.collect(0)
        assert not path.exists()
        assert (kept[1] == pixels_of(png(2, SIZE))).all()  # what a caller holds stays whole


async def test_a_client_that_knows_nothing_reads_a_clip_without_a_call(service: Running) -> None:
    item = await clip_of_pictures(service, [1, 2, 1], SIZE)
    await service.library.map_frames(item)
    async with (
        MediaClient.open(service.grpc) as client,
        MediaClient.open(service.grpc, same_host=False) as far,
    ):
        before = messages(client)
        frames = await client.frames(item.ref)
        assert (frames[1] == pixels_of(png(2, SIZE))).all()
        assert client.kept()["loads"] == 2
        assert (await client.info(item.ref)).timestamps_s == (0, 0.2, 0.4)
        assert messages(client) == before
        await far.frames(item.ref)
    assert service.library.counters.count("bytes_streamed") == 2 * BYTES


# ---------------------------------------------------------------------- the cache


async def test_the_cache_is_bounded_and_forgets_the_oldest(service: Running) -> None:
    async with MediaClient.open(service.grpc, cache_bytes=2 * BYTES) as client:
        refs = [await client.put_image(png(seed, SIZE), "run") for seed in range(3)]
        for ref in refs:
            await client.frame(ref)
        assert client.kept() == {"bytes": 2 * BYTES, "hits": 0, "loads": 3}
        await client.frame(refs[2])
        await client.frame(refs[0])
        assert client.kept() == {"bytes": 2 * BYTES, "hits": 1, "loads": 4}


def test_a_value_that_is_too_large_evicts_nothing() -> None:
    cache: LocalCache[str, str] = LocalCache(10)
    cache.keep("small", "s", 4)
    cache.keep("large", "l", 11)
    assert (cache.get("small"), cache.get("large"), cache.used) == ("s", None, 4)
    cache.keep("small", "t", 6)
    assert (cache.get("small"), cache.used) == ("t", 6)
    cache.clear()
    assert (cache.get("small"), cache.used) == (None, 0)


async def test_concurrent_reads_of_one_frame_share_a_call(service: Running) -> None:
    async with MediaClient.open(service.grpc, same_host=False) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        frames = await asyncio.gather(*(client.frame(ref) for _ in range(16)))
        assert len({id(frame) for frame in frames}) == 1
    assert service.library.counters.count("bytes_streamed") == BYTES


async def test_payload_of_a_group_moves_once(service: Running) -> None:
    async with MediaClient.open(service.grpc) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        service.library.store.shared.remove("frame", (await client.info(ref)).frame_digests[0])
        for _ in range(16):
            await client.frame(ref)
        assert counted(client, "payload_bytes/client_frame/logical_media") == 16 * BYTES
        assert counted(client, "payload_bytes/client_frame/physical_media") == BYTES
        assert counted(client, "payload_bytes/client_frame/estimated_saved") == 15 * BYTES
        assert counted(client, "payload_counts/client_frame/logical_segments") == 16
        assert counted(client, "payload_counts/client_frame/physical_segments") == 1
        assert counted(client, "payload_ratio/client_frame/physical_to_logical") == 1 / 16
        assert 0 < counted(client, "payload_bytes/media_get/serialized") < 1000  # a path, not pixels
        status = (await client.status()).counters
    served = status["payload_bytes/media_put/serialized"]
    assert served == counted(client, "payload_bytes/media_put/serialized") > len(png(0, SIZE))
    assert (status["map_rate"], status["dedup_ratio"]) == (1.0, 1.0)
    assert status["payload_counts/media_put/frame/physical_segments"] == 1
    assert status["payload_bytes/media_put/serialized_mean_per_call"] == served
    assert status["payload_counts/media_get/frame/logical_segments"] > 0


# ---------------------------------------------------------------------- answers that are wrong


async def test_a_copy_with_other_bytes_is_refused(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async with MediaClient.open(service.grpc, same_host=False, deadline_s=5) as client:
        reply = await client.put(png(0, SIZE), "run")
        ref = MediaRef(MediaKind.IMAGE, Digest(reply.ref.digest))
        assert await client.source(reply.source_digest) == png(0, SIZE)
        wrong = memoryview(bytes(BYTES))
        for size, part in ((BYTES, wrong), (BYTES - 1, wrong[1:])):
            monkeypatch.setattr(service.library.store, "open", lambda blob, data=part: data)
            with pytest.raises(OmnifleetError) as caught:
                await client.frame(ref)
            assert caught.value.reason is Reason.CORRUPT, size
        for read in (
            client.source(reply.source_digest),
            client.fetch(media_pb2.OBJECT_PART_MANIFEST, ref.digest),
        ):
            with pytest.raises(OmnifleetError) as caught:
                await read
            assert caught.value.reason is Reason.CORRUPT


async def test_an_answer_larger_than_announced_is_refused_before_it_is_allocated(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MediaClient.open(service.grpc, same_host=False, deadline_s=5) as client:
        ref = await client.put_image(png(0, SIZE), "run")
        monkeypatch.setattr(service.library.store, "open", lambda blob: memoryview(bytes(BYTES + 1)))
        with pytest.raises(OmnifleetError, match="not at most 30000") as caught:
            await client.frame(ref)
    assert caught.value.reason is Reason.CORRUPT


# ---------------------------------------------------------------------- rows about lost content


async def test_RED_01_three_lost_blobs_are_three_clean_misses(tmp_path: Path) -> None:
    async with running(tmp_path, shared_memory_bytes=1) as service, MediaClient.open(service.grpc) as client:
        refs = [await client.put_image(png(seed), "run") for seed in range(10)]
        blobs = tmp_path / "media" / "blobs" / "frame"
        for ref in refs[:3]:
            next(blobs.rglob((await client.info(ref)).frame_digests[0])).unlink()
    async with running(tmp_path, shared_memory_bytes=1) as service, MediaClient.open(service.grpc) as client:
        read = await asyncio.gather(*(client.frame(ref) for ref in refs), return_exceptions=True)
        lost, found = read[:3], read[3:]
        assert [error.reason for error in lost if isinstance(error, OmnifleetError)] == [
            Reason.MEDIA_LOST
        ] * 3
        for seed, pixels in enumerate(found, 3):
            assert isinstance(pixels, np.ndarray)
            assert (pixels == pixels_of(png(seed))).all()
        assert await client.has([ref.digest for ref in refs]) == [False] * 3 + [True] * 7


async def test_RED_08_content_that_goes_between_has_and_get_is_a_miss(tmp_path: Path) -> None:
    async with running(tmp_path) as service, MediaClient.open(service.grpc, same_host=False) as client:
        for seed in range(20):
            ref = await client.put_image(png(seed), "run")
            assert await client.has([ref.digest]) == [True]
            await client.collect(0)
            with pytest.raises(OmnifleetError) as caught:
                await client.frame(ref)
            assert caught.value.reason in (Reason.NOT_FOUND, Reason.MEDIA_LOST)


async def test_RED_10_a_release_that_is_sent_twice_drops_nobody_elses_lease(service: Running) -> None:
    async with MediaClient.open(service.grpc) as client:
        ref = await client.put_image(png(), "run")
        mine = await client.take_lease([ref.digest], "one", "run", 60)
        await client.take_lease([ref.digest], "two", "run", 60)
        assert [await client.release_lease(mine) for _ in range(3)] == [True, False, False]
        assert (await client.stat(ref.digest)).leases == 1
        await client.collect(0)
        assert await client.has([ref.digest]) == [True]


async def test_a_stored_source_is_decoded_in_one_more_way_without_its_bytes(service: Running) -> None:
    film = h264(greys(24))
    four, two = [
        {"kind": MediaKind.VIDEO, "contract": media_pb2.DecodeContract(sampling="uniform@1", num_frames=n)}
        for n in (4, 2)
    ]

    def by_the_blocking_client(source: str) -> tuple[media_pb2.PutReply, OmnifleetError]:
        with SyncMediaClient(service.grpc, deadline_s=60) as media:
            with pytest.raises(OmnifleetError) as caught:
                media.decode("ab" * 32, "run", **two)
            return media.decode(source, "run", **two), caught.value

    async with MediaClient.open(service.grpc, deadline_s=60) as client:
        source = (await client.put(film, "run", **four)).source_digest
        received = (await client.status()).counters["bytes_received"]
        decoded = await client.decode(source, "run", **two)
        assert [int(f[0, 0, 0]) for f in await client.frames(ref_of(decoded))] == pytest.approx(
            [0, 230], abs=2
        )
        again, missing = await asyncio.to_thread(by_the_blocking_client, source)
        assert (again.ref.digest, again.decoded) == (decoded.ref.digest, False)
        assert missing.reason is Reason.NOT_FOUND
        assert ref_of(await client.put(film, "run", **two)) == ref_of(decoded)  # one alias for both calls
        assert (await client.status()).counters["decodes"] == 2
        assert received == len(film)


# ---------------------------------------------------------------------- the client that blocks


async def test_the_blocking_client_does_what_the_other_does(service: Running) -> None:
    def work() -> dict[str, Any]:
        with SyncMediaClient(service.grpc, name="sync", deadline_s=30) as media:
            ref = media.put_image(png(0, SIZE), "run")
            reply = media.put(png(1, SIZE), "run", lease_owner="me", lease_ttl_ms=60_000)
            lease = media.take_lease([ref.digest], "me", "run", 60)
            media.renew_lease(lease, 120)
            first = media.frame(ref)
            seen = {
                "equal": (first == pixels_of(png(0, SIZE))).all(),
                "again": media.frame(ref) is first,
                "frames": len(media.frames(ref)),
                "info": (media.info(ref).width, media.stat(ref.digest).leases),
                "has": media.has([ref.digest, "ab" * 32]),
                "source": media.source(reply.source_digest) == png(1, SIZE),
                "released": media.release_lease(lease),
                "kept": media.collect(0).removed >= 1 and media.has([reply.ref.digest]) == [True],
                "verified": media.verify().corrupt,
                "state": media.status().state,
                "logical": media.payload.snapshot()["payload_bytes/client_frame/logical_media"],
            }
            with pytest.raises(OmnifleetError) as caught:
                media.put_url("/etc/passwd", "run")
            seen["refused"] = caught.value.reason
            return seen

    assert await asyncio.to_thread(work) == {
        "equal": True,
        "again": True,
        "frames": 1,
        "info": (100, 1),
        "has": [True, False],
        "source": True,
        "released": True,
        "kept": True,
        "verified": (),
        "state": "serving",
        "logical": 3 * BYTES,
        "refused": Reason.INVALID_REQUEST,
    }
    assert not [thread for thread in threading.enumerate() if thread.name == "media-client"]


async def test_many_threads_share_one_blocking_client(service: Running) -> None:
    def work() -> None:
        with SyncMediaClient(service.grpc, deadline_s=30, cache_bytes=3 * BYTES) as media:
            refs = [media.put_image(png(seed, SIZE), "run") for seed in range(6)]

            def read(i: int) -> bool:
                seed = i % 6
                return bool((media.frame(refs[seed]) == pixels_of(png(seed, SIZE))).all())

            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(read, range(120)))
            assert media.client.kept()["bytes"] <= 3 * BYTES

    await asyncio.to_thread(work)


async def test_a_blocking_client_that_can_not_connect_leaves_no_thread(service: Running) -> None:
    def work() -> OmnifleetError:
        with pytest.raises(OmnifleetError) as caught, SyncMediaClient("127.0.0.1:1", deadline_s=0.2):
            pass
        return caught.value

    assert (await asyncio.to_thread(work)).reason in (Reason.UNAVAILABLE, Reason.DEADLINE)
    assert not [thread for thread in threading.enumerate() if thread.name == "media-client"]
    with pytest.raises(RuntimeError, match="with"):
        SyncMediaClient(service.grpc).frame(MediaRef(MediaKind.IMAGE, Digest("ab" * 32)))


async def test_a_segment_is_kept_under_its_processor(service: Running) -> None:
    """The tensors themselves are tested with real processors in test_media_segments.py."""
    async with MediaClient.open(service.grpc) as client:
        ref, spec = await client.put_image(png(), "run"), ImageProcessorSpec("P", {"a": 1})
        assert client.kept_segment(ref, spec) is None
        with pytest.raises(OmnifleetError) as caught:
            await client.segment(ref, spec, "run")
        assert caught.value.reason is Reason.UNSUPPORTED
        assert client.kept()["loads"] == 0
