"""Field cases that are about the service rather than a source, over every route; and that none is left out.

What a client calls a picture (a file name, a path, a URL) names no content; a decoder that hangs holds up nobody; an index
that lost its memory is told again by whatever comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnifleet.client.media import calls
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaRef
from omnifleet.vision_grid import qwen2vl_grid
from omnifleet_media.sandbox.pool import ProcessPool
from tests.contract import every_route, test_media_routes, test_media_routes_rows, test_media_segments
from tests.contract.every_route import (
    ROUTES,
    Put,
    Route,
    Service,
    answered,
    by_data_url,
    by_grpc,
    by_many,
    by_upload,
    named,
    png,
    route,
    service,
)
from tests.contract.picture_server import ok
from tests.contract.test_media_routes import B_FRAMES, uniform
from tests.support_redis import RedisServer, redis_server
from tests.unit.test_media_clips_segments import C5
from tests.unit.test_media_sandbox import open_files, resident

__all__ = ["route", "service"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


# ---------------------------------------------------------------------- names


async def _same_path(service: Service, put: Put) -> MediaRef:
    (service.folder / "u1").write_bytes(put.data)
    return await named(service, put, str(service.folder / "u1"))


async def _same_url(service: Service, put: Put) -> MediaRef:
    service.web.answers["/u1"] = ok(put.data)
    return await named(service, put, service.web.url("/u1"))


async def _same_form(service: Service, put: Put) -> MediaRef:
    return answered(
        await service.http.post("/v1/media", params=put.query, files={"file": ("u1", put.data)}), put
    )


UNDER_ONE_NAME: dict[str, Route] = {
    "data URL": by_data_url,
    "upload": by_upload,
    "form": _same_form,
    "URL": _same_url,
    "path": _same_path,
    "gRPC": by_grpc,
    "gRPC, many": by_many,
}


@pytest.mark.parametrize("way", UNDER_ONE_NAME)
async def test_hsh_09_a_name_is_bound_to_no_content(service: Service, way: str) -> None:
    put = UNDER_ONE_NAME[way]
    red, blue = np.full((56, 56, 3), (255, 0, 0), np.uint8), np.full((56, 112, 3), (0, 0, 255), np.uint8)
    first, second = [await put(service, Put(png(pixels))) for pixels in (red, blue)]
    assert first != second
    assert (await service.client.frame(second) == blue).all()
    assert (await service.client.frame(first) == red).all()
    info = await service.client.info(second)
    assert qwen2vl_grid(C5, info.height, info.width).tokens == 8


# ---------------------------------------------------------------------- decoders


async def test_vid_18_a_stuck_decode_blocks_nobody_on_any_route(service: Service) -> None:
    decoder: Any = service.library._decoder
    stuck = ProcessPool(
        "tests.unit.stuck_probe",
        3,
        work_s=1.0,
        memory_bytes=1 << 30,
        reply_bytes=1 << 20,
        time_knob="media.limits.decode_seconds",
    )
    clips, decoder.clips = decoder.clips, stuck
    try:
        waiting = [
            asyncio.create_task(way(service, uniform(B_FRAMES + bytes(i + 1))))
            for i, way in enumerate(ROUTES.values())
        ]
        for i, way in enumerate(ROUTES.values()):
            shade = np.full((2, 2, 3), 100 + i, np.uint8)
            assert (await service.client.frame(await way(service, Put(png(shade)))) == shade).all()
        assert not all(task.done() for task in waiting)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, OmnifleetError)
            assert (outcome.reason, outcome.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.decode_seconds")
    finally:
        decoder.clips = clips
        await stuck.close()
    assert stuck.replaced >= len(ROUTES)


async def clips_leak_nothing(service: Service, warm_up: int, total: int) -> None:
    """Clips that are new to the service, eight at once over all routes: memory and descriptors of decoder and service."""
    pool = service.library._decoder.clips
    pids = [(await pool.warm())["pid"], os.getpid()]
    ways = list(ROUTES.values())

    async def decode(count: int) -> None:
        for _ in range(count):
            n = next(service.numbers)
            await ways[n % len(ways)](service, uniform(B_FRAMES + bytes(1_000 + n)))

    async def measured(count: int) -> list[tuple[int, int]]:
        await asyncio.gather(*(decode(count // 8) for _ in range(8)))
        service.web.answers.clear()
        return [(resident(pid), open_files(pid)) for pid in pids]

    before = await measured(warm_up)
    after = await measured(total - warm_up)
    assert pool.replaced == 0
    for (memory, files), (memory_after, files_after) in zip(before, after, strict=True):
        assert memory_after - memory < 30 << 20
        assert files_after <= files + 8  # connections that are on their way out


async def test_vid_17_clips_leak_nothing_on_any_route(service: Service) -> None:
    await clips_leak_nothing(service, 24, 56)


@pytest.mark.soak
async def test_vid_17_two_thousand_clips_leak_nothing_on_any_route(service: Service) -> None:
    await clips_leak_nothing(service, 200, 2_000)


# ---------------------------------------------------------------------- an index that lost its memory


async def test_red_03_what_comes_in_again_is_known_again_on_every_route(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("red")
    with redis_server() as redis:
        async with every_route.opened(folder, index=redis.url) as service:
            puts = {name: Put(png(np.full((2, 2, 3), i, np.uint8))) for i, name in enumerate(ROUTES)}
            refs = {name: await ROUTES[name](service, put) for name, put in puts.items()}
            redis.ask("FLUSHALL")
            for name, put in puts.items():  # by content
                assert await ROUTES[name](service, put) == refs[name]
            redis.ask("FLUSHALL")
            service.client.forget()
            for i, name in enumerate(ROUTES):  # by id: told anew from disk
                assert (await service.client.frame(refs[name]) == i).all()


async def test_red_01_what_was_lost_is_a_clean_miss_and_comes_back_on_every_route(service: Service) -> None:
    for i, way in enumerate(ROUTES.values()):
        shade = np.full((3, 2, 3), 50 + i, np.uint8)
        ref = await way(service, Put(png(shade)))
        digest = (await service.client.info(ref)).frame_digests[0]
        service.library.store.remove("frame", digest)
        service.client.forget()
        assert await service.client.has([ref.digest]) == [False]
        with pytest.raises(OmnifleetError) as caught:
            await service.client.frame(ref)
        assert caught.value.reason is Reason.MEDIA_LOST
        assert await way(service, Put(png(shade))) == ref
        assert (await service.client.frame(ref) == shade).all()


async def test_red_08_what_goes_while_it_comes_in_is_a_clean_miss(service: Service) -> None:
    missed = 0
    for i, way in enumerate(ROUTES.values()):
        shade = np.full((2, 3, 3), 150 + i, np.uint8)
        ref = await way(service, Put(png(shade)))
        digest = (await service.client.info(ref)).frame_digests[0]
        for turn in range(8):
            service.client.forget()
            gone = asyncio.create_task(asyncio.to_thread(service.library.store.remove, "frame", digest))
            if turn % 2:
                await gone
                with pytest.raises(OmnifleetError) as caught:
                    await service.client.frame(ref)
                assert caught.value.reason is Reason.MEDIA_LOST
                missed += 1
            assert await way(service, Put(png(shade))) == ref
            await gone
            try:
                assert (await service.client.frame(ref) == shade).all()
            except OmnifleetError as error:
                assert error.reason is Reason.MEDIA_LOST
            assert await way(service, Put(png(shade))) == ref
            assert (await service.client.frame(ref) == shade).all()
    assert missed == 4 * len(ROUTES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on_redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Service, RedisServer]]:
    with redis_server() as redis:
        folder = tmp_path_factory.mktemp("redis")
        async with every_route.opened(folder, index=redis.url) as service:
            yield service, redis


async def test_red_05_a_cancelled_put_leaves_its_reply_to_nobody_on_any_route(
    on_redis: tuple[Service, RedisServer],
) -> None:
    service, redis = on_redis
    for i, way in enumerate(ROUTES.values()):
        one, two = [np.full((4, 4, 3), 2 * i + k, np.uint8) for k in range(2)]
        first, second = [await way(service, Put(png(pixels))) for pixels in (one, two)]
        for turn in range(12):
            if turn == 4:
                redis.ask("CLIENT", "PAUSE", 50, "ALL")
            asking = asyncio.create_task(way(service, Put(png(one))))
            await asyncio.sleep(0.001 * turn)
            asking.cancel()
            assert await way(service, Put(png(two))) == second
            with contextlib.suppress(asyncio.CancelledError):
                assert await asking == first


async def test_red_09_a_full_redis_answers_when_to_come_again_on_every_route(
    on_redis: tuple[Service, RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, redis = on_redis
    monkeypatch.setattr(calls, "PASSING", frozenset())  # the client's own patience is not the matter
    kept = await by_grpc(service, Put(png(np.full((4, 4, 3), 200, np.uint8))))
    lease = await service.client.take_lease([kept.digest], "one", "run", 600)
    puts = {name: Put(png(np.full((4, 4, 3), 201 + i, np.uint8))) for i, name in enumerate(ROUTES)}
    redis.ask("CONFIG", "SET", "maxmemory", 1)
    for name, put in puts.items():
        with pytest.raises(OmnifleetError) as caught:  # 503 over HTTP
            await ROUTES[name](service, put)
        error = caught.value
        assert (error.reason, error.retryable, error.knob) == (Reason.UNAVAILABLE, True, "maxmemory"), name
        assert error.retry_after_ms > 0
    service.client.forget()
    assert (await service.client.frame(kept) == 200).all()
    redis.ask("CONFIG", "SET", "maxmemory", 0)
    assert (await service.client.stat(kept.digest)).leases == 1
    for name, put in puts.items():
        assert (await service.client.frame(await ROUTES[name](service, put))).shape == (4, 4, 3)
    await service.client.release_lease(lease)


async def test_red_10_a_release_sent_twice_keeps_what_came_by_any_route(
    on_redis: tuple[Service, RedisServer],
) -> None:
    service, _ = on_redis
    for i, way in enumerate(ROUTES.values()):
        ref = await way(service, Put(png(np.full((5, 4, 3), i, np.uint8))))
        one, _two = [
            await service.client.take_lease([ref.digest], owner, "run", 600) for owner in ("one", "two")
        ]
        assert [await service.client.release_lease(one) for _ in range(2)] == [True, False]
        assert (await service.client.stat(ref.digest)).leases == 1
        await service.client.collect(0)
        service.client.forget()
        assert (await service.client.frame(ref) == i).all()


# ---------------------------------------------------------------------- none is left out

ROWS = """
IMG-01 IMG-03 IMG-04 IMG-06 IMG-08 IMG-10 IMG-12 IMG-14 IMG-16 IMG-17 IMG-19 IMG-20
VID-01 VID-03 VID-05 VID-06 VID-07 VID-09 VID-11 VID-13 VID-15 VID-17 VID-18
HSH-01 HSH-03 HSH-05 HSH-07 HSH-08 HSH-09 HSH-11 HSH-13
RED-01 RED-03 RED-05 RED-08 RED-09 RED-10 SEC-01 SEC-03 SEC-05 SEC-06
"""
"""All cases IMG, VID, HSH, RED and SEC.

SEC-01, SEC-03 and SEC-05 name sources by path and URL: tests/contract/test_media_safety.py, and test_media_gateway.py through
the gateway; here they are the bytes that are put.
"""


async def test_every_case_is_tested_on_every_route() -> None:
    told = [*test_media_routes.PICTURES, *test_media_routes.CLIPS, *test_media_routes.REFUSED]
    for module in (test_media_routes, test_media_routes_rows, test_media_segments):
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and re.search(
                r"route|ROUTES|UNDER_ONE_NAME|named", inspect.getsource(test)
            ):
                told.append(name)
    found = {
        f"{kind.upper()}-{number}"
        for text in told
        for kind, number in re.findall(r"(?i)\b(?:test_)?([a-z]{3})[-_](\d\d)", text)
    }
    assert found >= set(ROWS.split()), set(ROWS.split()) - found
