"""What is sent is bounded before it is held, each upload alone and all together."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from tests.contract.media_routes import routes
from tests.contract.media_world import png, running


async def test_an_upload_that_says_it_is_too_large_is_refused_before_its_bytes(tmp_path: Path) -> None:
    async def only_a_header() -> AsyncIterator[media_pb2.PutRequest]:
        yield media_pb2.PutRequest(header=media_pb2.PutHeader(run="run", bytes=3 << 20))
        await asyncio.Event().wait()  # the refusal must not wait for a byte

    limits = {"source_bytes": 1 << 20}
    async with running(tmp_path, limits=limits) as service, open_channel(service.grpc) as channel:
        with pytest.raises(OmnifleetError) as caught, remote_errors():
            await MediaStub(channel).Put(only_a_header(), timeout=30)
        assert (caught.value.reason, caught.value.knob) == (
            Reason.LIMIT_EXCEEDED,
            "media.limits.source_bytes",
        )
        host, _, port = service.http.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/media HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        await writer.drain()
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        assert b" 413 " in answer
        writer.close()
        assert service.library.counters.count("bytes_received") == 0


async def test_a_data_url_is_measured_by_its_payload(tmp_path: Path) -> None:
    picture = png(size=(550, 550))
    url = b"data:image/png;base64," + base64.b64encode(picture)
    async with routes(tmp_path, limits={"source_bytes": 1 << 20}) as route:
        assert len(picture) < 1 << 20 < len(url)
        digest = (await route.client.put_image(url, "run")).digest
        assert (await route.http.post("/v1/media", content=url)).json()["digest"] == digest


async def test_uploads_in_memory_are_bounded_together(tmp_path: Path) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    async def slow(first: bytes) -> AsyncIterator[bytes]:
        yield first
        started.set()
        await finish.wait()
        yield b""

    picture = png(size=(300, 300))
    limits = {"uploads_bytes": len(picture) + 1000}
    async with running(tmp_path, limits=limits) as service:
        async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=30) as http:
            held = asyncio.create_task(http.post("/v1/media", content=slow(picture)))
            await started.wait()
            async with asyncio.timeout(20):
                while service.door.reserved < len(picture):  # noqa: ASYNC110 - on its way; no event tells
                    await asyncio.sleep(0.01)
            refused = await http.post("/v1/media", content=picture)
            assert (refused.status_code, refused.json()["error"]["knob"]) == (
                429,
                "media.limits.uploads_bytes",
            )
            assert refused.headers["retry-after"] == "1"
            finish.set()
            assert (await held).status_code == 200
            assert (await http.post("/v1/media", content=picture)).status_code == 200


async def test_a_json_body_is_read_strictly(tmp_path: Path) -> None:
    async with routes(tmp_path) as route:
        large = await route.http.post("/v1/media", json={"url": "data:," + "x" * (1 << 20)})
        assert (large.status_code, "raw body" in large.json()["error"]["message"]) == (413, True)
        for body in (
            "[" * 100_000,
            "[]",
            "{}",
            '{"url": 3}',
            '{"url": "x", "pathh": 1}',
            "{",
            '{"url": "x", "contract": {"frames": 3}}',
        ):
            answer = await route.http.post(
                "/v1/media", content=body, headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), body
        url = "data:image/png;base64," + base64.b64encode(png()).decode()
        assert (
            await route.by_http(url)
            == await route.by_grpc(url)
            == (await route.client.put_image(png(), "r")).digest
        )
        assert json.loads((await route.http.post("/v1/media", json={"url": url})).text)["decoded"] is False
