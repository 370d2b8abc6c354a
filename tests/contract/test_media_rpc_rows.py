"""The media service under large messages, callers that go away, and callers that are wrong."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from PIL import Image

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from omnifleet_media.server.run import Running
from tests.contract.media_world import pixels_of, png, running

SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path, limits={"decode_seconds": 60}) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- what is waited for happens in another task's cleaning up
            await asyncio.sleep(0.01)


def raw(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "BMP")
    return out.getvalue()


@pytest.mark.parametrize("width", [1182, 1183])
async def test_RPC_01_pictures_around_4_mib_pass_both_ways(service: Running, width: int) -> None:
    data = raw(width, 1182)
    async with MediaClient.open(service.grpc, same_host=False) as client:
        pixels = await client.frame(await client.put_image(data, "run"))
        assert (pixels == pixels_of(data)).all()
        assert pixels.nbytes == width * 1182 * 3
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http:
        stored = (await http.post("/v1/media", content=data)).json()
        assert (await http.get(f"/v1/blobs/frame/{stored['frames'][0]}")).content == pixels_of(data).tobytes()


async def test_RPC_01_one_message_above_the_limit_is_refused_by_name(service: Running) -> None:
    async def whole_at_once() -> AsyncIterator[media_pb2.PutRequest]:
        yield media_pb2.PutRequest(header=media_pb2.PutHeader(run="run"))
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=bytes(17 << 20)))

    async with open_channel(service.grpc) as channel:
        with pytest.raises(OmnifleetError) as caught, remote_errors():
            await MediaStub(channel).Put(whole_at_once(), timeout=60)
    assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "limits.message_bytes")
    assert str(16 << 20) in caught.value.message


async def test_RPC_03_an_upload_whose_caller_goes_away_leaves_nothing(service: Running) -> None:
    sent = asyncio.Event()

    async def half() -> AsyncIterator[media_pb2.PutRequest]:
        yield media_pb2.PutRequest(header=media_pb2.PutHeader(run="run"))
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=png()))
        sent.set()
        await asyncio.Event().wait()

    async with open_channel(service.grpc) as channel:
        call = MediaStub(channel).Put(half(), timeout=600)
        await sent.wait()
        await until(lambda: service.door.reserved > 0)
        call.cancel()
        await until(lambda: service.door.reserved == 0)
        with pytest.raises(grpc.RpcError) as caught:
            await MediaStub(channel).Put(half(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.door.reserved == 0)
    async with httpx.AsyncClient(base_url=f"http://{service.http}") as http:
        _, writer = await asyncio.open_connection(*service.http.split(":"))
        writer.write(b"POST /v1/media HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n" + png())
        await writer.drain()
        await until(lambda: service.door.reserved > 0)
        writer.close()
        await until(lambda: service.door.reserved == 0)
        assert (await http.get("/readyz")).status_code == 200
    assert service.library.counters.count("puts") == 0


async def test_an_upload_without_its_last_chunk_stores_nothing(service: Running) -> None:
    async def cut(data: bytes, **marks: bool) -> AsyncIterator[media_pb2.PutRequest]:
        yield media_pb2.PutRequest(header=media_pb2.PutHeader(run="run"))
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=data, **marks))

    async def goes_on_after_its_end() -> AsyncIterator[media_pb2.PutRequest]:
        async for request in cut(png(), last=True):
            yield request
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=b"x", offset=len(png())))

    async with open_channel(service.grpc) as channel:
        for requests in (cut(png()), goes_on_after_its_end()):
            with pytest.raises(OmnifleetError) as caught, remote_errors():
                await MediaStub(channel).Put(requests, timeout=60)
            assert caught.value.reason is Reason.INVALID_REQUEST
        assert service.library.counters.count("puts") == 0
        assert (await MediaStub(channel).Put(cut(png(), last=True), timeout=60)).decoded


@pytest.mark.parametrize(("calls", "silent"), [(60, 40), pytest.param(2000, 500, marks=SOAK)])
async def test_RPC_06_connections_give_their_descriptors_back(
    service: Running, calls: int, silent: int
) -> None:
    me = psutil.Process()

    async def cycle() -> None:
        async with MediaClient.open(service.grpc, deadline_s=60) as client:
            await client.has(["ab" * 32])

    for _ in range(5):
        await cycle()
    before = me.num_fds()
    for _ in range(calls):
        await cycle()
    for _ in range(silent):
        for address in (service.grpc, service.http):
            _, writer = await asyncio.open_connection(*address.split(":"))
            writer.close()
            await writer.wait_closed()
    await until(lambda: me.num_fds() <= before + 5)


@pytest.mark.parametrize("calls", [400, pytest.param(20_000, marks=SOAK)])
async def test_RPC_07_cancelled_streams_keep_no_memory(service: Running, calls: int) -> None:
    async with open_channel(service.grpc) as channel:
        async with MediaClient.open(service.grpc) as client:
            reply = await client.put(raw(1183, 1182), "run")
        request = media_pb2.GetRequest(part=media_pb2.OBJECT_PART_FRAME, digest=reply.info.frame_digests[0])

        async def cancelled() -> None:
            call = MediaStub(channel).Get(request, timeout=60)
            async for _ in call:
                call.cancel()
                break

        for _ in range(100):
            await cancelled()
        before = psutil.Process().memory_info().rss
        for _ in range(calls):
            await cancelled()
        assert psutil.Process().memory_info().rss - before < 50 << 20


async def test_RPC_08_mistakes_of_callers_are_told_as_theirs(service: Running) -> None:
    unknown = "ab" * 32
    async with (
        AsyncExitStack() as stack,
        MediaClient.open(service.grpc, deadline_s=20) as client,
        httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http,
    ):
        stub = MediaStub(await stack.enter_async_context(open_channel(service.grpc)))
        for call, code in (
            (stub.Stat(media_pb2.StatRequest(digest=unknown), timeout=20), grpc.StatusCode.NOT_FOUND),
            (stub.Stat(media_pb2.StatRequest(digest="x"), timeout=20), grpc.StatusCode.INVALID_ARGUMENT),
            (
                stub.RenewLease(media_pb2.RenewLeaseRequest(id="x", ttl_ms=1), timeout=20),
                grpc.StatusCode.NOT_FOUND,
            ),
            (stub.TakeLease(media_pb2.TakeLeaseRequest(), timeout=20), grpc.StatusCode.INVALID_ARGUMENT),
            (
                stub.Decode(media_pb2.DecodeRequest(source_digest=unknown), timeout=20),
                grpc.StatusCode.NOT_FOUND,
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await call
            assert caught.value.code() is code
        with pytest.raises(OmnifleetError) as told:
            await client.put_image(png()[:40], "run")
        assert told.value.reason is Reason.INVALID_MEDIA
        with pytest.raises(OmnifleetError) as told:
            await client.frame(MediaRef(MediaKind.IMAGE, Digest(unknown)))
        assert (told.value.reason, told.value.retryable) == (Reason.NOT_FOUND, False)
        statuses = {
            "bad picture": (await http.post("/v1/media", content=png()[:40])).status_code,
            "no form part": (await http.post("/v1/media", files={"x": b"1"})).status_code,
            "broken form": (
                await http.post(
                    "/v1/media", content=b"--", headers={"Content-Type": "multipart/form-data; boundary=x"}
                )
            ).status_code,
            "form without boundary": (
                await http.post("/v1/media", content=b"--", headers={"Content-Type": "multipart/form-data"})
            ).status_code,
            "unknown": (await http.get(f"/v1/media/{unknown}")).status_code,
            "malformed": (await http.get("/v1/media/x")).status_code,
            "no such frame": (await http.get(f"/v1/media/{unknown}/frames/x")).status_code,
        }
    assert statuses == {
        "bad picture": 400,
        "no form part": 400,
        "broken form": 400,
        "form without boundary": 400,
        "unknown": 404,
        "malformed": 400,
        "no such frame": 422,
    }
