"""Field cases that are about the service rather than a source, over every route; and that none is left out.

What a client calls a picture (a file name, a path, a URL) names no content; a decoder that hangs holds up nobody; an index
that lost its memory is told again by whatever comes in.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from typing import Any

import numpy as np
import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaRef
from omnifleet_media.sandbox.pool import ProcessPool
from tests.contract import every_route, test_media_routes, test_media_routes_rows
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
from tests.support_redis import redis_server

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


# ---------------------------------------------------------------------- none is left out

ROWS = """
IMG-01 IMG-03 IMG-04 IMG-06 IMG-08 IMG-10 IMG-12 IMG-17 IMG-19 IMG-20
VID-01 VID-03 VID-05 VID-06 VID-07 VID-09 VID-11 VID-13 VID-15 VID-18
HSH-01 HSH-03 HSH-05 HSH-07 HSH-08 HSH-09 HSH-13
RED-01 RED-03 SEC-01 SEC-03 SEC-05 SEC-06
"""
"""Of the cases IMG, VID, HSH, RED and SEC, those in which the way in could matter.

Elsewhere, since they are about what comes after: IMG-14 and IMG-16 (processors), VID-17 (leaks of decoders), HSH-11 (a
thousand addresses, by gRPC), RED-05 and RED-08 to RED-10 (the index). SEC-01, SEC-03 and SEC-05 name sources by path and
URL: tests/contract/test_media_safety.py; here they are the bytes that are put.
"""


async def test_every_case_is_tested_on_every_route() -> None:
    told = [*test_media_routes.PICTURES, *test_media_routes.CLIPS, *test_media_routes.REFUSED]
    for module in (test_media_routes, test_media_routes_rows):
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
