"""The media service over real gRPC, in this process."""

from __future__ import annotations

import asyncio
import base64
import io
import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omnifleet.auth import Scope, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from tests.contract.media_world import pixels_of, png, running, served
from tests.unit.test_media_pictures import png_claiming

UNKNOWN = MediaRef(MediaKind.IMAGE, Digest("ab" * 32))


async def refused(call) -> OmnifleetError:  # type: ignore[no-untyped-def]
    with pytest.raises(OmnifleetError) as caught:
        await call
    return caught.value


async def test_a_picture_comes_back_mapped_and_streamed(tmp_path: Path) -> None:
    data = png(size=(700, 600))  # more than one chunk of pixels
    async with running(tmp_path) as service:
        async with (
            MediaClient.open(service.grpc) as near,
            MediaClient.open(service.grpc, same_host=False) as far,
        ):
            ref = await near.put_image(data, "run")
            for client in (near, far):
                pixels = await client.frame(ref)
                assert (pixels == pixels_of(data)).all()
                assert not pixels.flags.writeable
            info = await near.info(ref)
            assert (info.width, info.height, info.bytes) == (700, 600, 700 * 600 * 3)
            counters = (await near.status()).counters
    assert counters["shm_maps"] == 0  # found in the shared folder, of which the handshake tells
    assert counters["bytes_streamed"] == 700 * 600 * 3


async def test_shared_memory_goes_with_the_service(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        view = await client.frame(await client.put_image(png(), "run"))
        assert list((tmp_path / "shm").iterdir())
    assert not list((tmp_path / "shm").iterdir())
    assert (view == pixels_of(png())).all()  # what a reader has mapped stays whole


async def test_the_same_picture_16_times_at_once_is_decoded_once(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        replies = await asyncio.gather(*(client.put(png(), "run") for _ in range(16)))
        counters = (await client.status()).counters
    assert len({reply.ref.digest for reply in replies}) == 1
    assert sum(reply.decoded for reply in replies) == 1
    assert (counters["puts"], counters["decodes"], counters["alias_hits"]) == (16, 1, 15)


async def test_hsh_03_other_bytes_of_the_same_picture_are_one_object(tmp_path: Path) -> None:
    def solid(**options: object) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (8, 8), (1, 2, 3)).save(out, "PNG", **options)
        return out.getvalue()

    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("note", "hello")
    files = [solid(compress_level=0), solid(compress_level=9), solid(pnginfo=text)]
    async with served(tmp_path) as client:
        replies = [await client.put(data, "run") for data in files]
    assert len({reply.ref.digest for reply in replies}) == 1
    assert len({reply.source_digest for reply in replies}) == 3
    assert len([p for p in (tmp_path / "media" / "blobs" / "frame").rglob("*") if p.is_file()]) == 1


async def test_hsh_05_background_gives_another_object_only_where_it_shows(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGBA", (1, 1), (0, 0, 0, 0)).save(out, "PNG")
    black = media_pb2.DecodeContract(background="000000")
    async with served(tmp_path) as client:
        clear = [await client.put(out.getvalue(), "run", contract=c) for c in (None, black)]
        opaque = [await client.put(png(), "run", contract=c) for c in (None, black)]
        shown = [(await client.frame(MediaRef(MediaKind.IMAGE, r.ref.digest))).tolist() for r in clear]
    assert shown == [[[[255] * 3]], [[[0] * 3]]]
    assert opaque[0].ref == opaque[1].ref


async def test_hsh_08_options_of_clips_do_not_miss_a_picture(tmp_path: Path) -> None:
    video = media_pb2.DecodeContract(sampling="uniform@1", num_frames=16, fps=2)
    async with served(tmp_path) as client:
        await client.put(png(), "run")
        assert not (await client.put(png(), "run", contract=video)).decoded


async def test_hsh_11_a_thousand_pictures_have_a_thousand_addresses(tmp_path: Path) -> None:
    def dot(i: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (1, 1), (i % 256, i // 256, 7)).save(out, "BMP")
        return out.getvalue()

    async with running(tmp_path) as service, MediaClient.open(service.grpc, deadline_s=240) as client:
        refs = await asyncio.gather(*(client.put_image(dot(i), "run") for i in range(1000)))
        assert len(set(refs)) == 1000
        for i in (0, 300, 999):
            assert (await client.frame(refs[i])).tolist() == [[[i % 256, i // 256, 7]]]


async def test_img_10_nothing_of_a_refused_picture_is_kept(tmp_path: Path) -> None:
    whole = png(size=(64, 64))
    async with served(tmp_path) as client:
        error = await refused(client.put_image(whole[:6000], "run"))
        assert (error.reason, error.retryable) == (Reason.INVALID_MEDIA, False)
        assert (await client.status()).counters["disk_bytes_used"] == 0
        ref = await client.put_image(whole, "run")
        assert (await client.frame(ref) == pixels_of(whole)).all()


async def test_img_12_a_bomb_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        await client.put_image(png(), "run")  # the decoder is up
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error = await refused(client.put_image(png_claiming(20000, 20000), "run"))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert (error.reason, error.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.pixels")
        await client.put_image(png(1), "run")
    assert grown < 50 << 10  # KiB


async def test_img_12_a_bomb_leaves_the_decoder_small(tmp_path: Path) -> None:
    # 20000 x 20000 RGB is 1.2 GB: with 64 MiB to spend, a decoder that allocated first would say "memory".
    limits = {"decode_memory_bytes": 64 << 20}
    async with served(tmp_path, limits=limits) as client:
        error = await refused(client.put_image(png_claiming(20000, 20000), "run"))
    assert error.knob == "media.limits.pixels"


async def test_img_17_a_data_url_is_its_payload(tmp_path: Path) -> None:
    body = base64.b64encode(png()).decode()
    async with served(tmp_path) as client:
        plain = await client.put(png(), "run")
        for header in ("data:image/png;base64,", "DATA:image/png;charset=utf-8;BASE64,"):
            reply = await client.put((header + body).encode(), "run")
            assert (reply.ref, reply.source_digest, reply.decoded) == (plain.ref, plain.source_digest, False)
        for bad in (b"data:image/png;base64", b"data:image/png,abc", b"data:image/png;base64,%%%%"):
            assert (await refused(client.put_image(bad, "run"))).reason is Reason.INVALID_MEDIA


@pytest.mark.parametrize(
    "data", [b"", b"<html></html>", b"<svg/>", b"/etc/passwd", b"file:///etc/passwd", b"http://x/a.png"]
)
async def test_img_20_what_is_not_media_is_invalid_media(tmp_path: Path, data: bytes) -> None:
    async with served(tmp_path) as client:
        assert (await refused(client.put_image(data, "run"))).reason is Reason.INVALID_MEDIA


async def test_an_upload_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, limits={"source_bytes": 1 << 20}) as client:
        error = await refused(client.put_image(bytes(3 << 20), "run"))
        assert (error.reason, error.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.source_bytes")
        assert (await client.status()).counters["bytes_received"] <= 2 << 20


async def test_parts_are_read_by_range(tmp_path: Path) -> None:
    data = png()
    async with running(tmp_path) as service, open_channel(service.grpc) as channel:
        async with MediaClient.open(service.grpc) as client:
            reply = await client.put(data, "run")
            source, _ = await client.fetch(media_pb2.OBJECT_PART_SOURCE, reply.source_digest)
            manifest, _ = await client.fetch(media_pb2.OBJECT_PART_MANIFEST, reply.ref.digest)
        request = media_pb2.GetRequest(
            part=media_pb2.OBJECT_PART_SOURCE, digest=reply.source_digest, offset=5, length=7
        )
        parts = [part async for part in MediaStub(channel).Get(request, timeout=5)]
    assert bytes(source) == data
    assert reply.info.frame_digests[0] in bytes(manifest).decode()
    assert parts[0].header.bytes == 7
    assert parts[1].chunk.data == data[5:12]
    assert parts[1].chunk.last


async def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        ref = await client.put_image(png(), "run")
        assert await client.has([ref.digest, UNKNOWN.digest]) == [True, False]
        assert (await refused(client.info(UNKNOWN))).reason is Reason.NOT_FOUND
        assert (await refused(client.frame(ref, 1))).reason is Reason.NOT_FOUND
        assert (await refused(client.stat("not hex"))).reason is Reason.INVALID_REQUEST
        assert (await refused(client.take_lease([UNKNOWN.digest], "o", "r", 5))).reason is Reason.MEDIA_LOST


async def test_a_lost_blob_is_media_lost_and_mended_by_another_upload(tmp_path: Path) -> None:
    async with served(tmp_path, shared_memory_bytes=1) as client:
        ref = await client.put_image(png(), "run")
        frame = (await client.info(ref)).frame_digests[0]
        next((tmp_path / "media" / "blobs" / "frame").rglob(frame)).unlink()
        assert await client.has([ref.digest]) == [False]
        assert (await refused(client.frame(ref))).reason is Reason.MEDIA_LOST
        assert (await client.put(png(), "run")).decoded
        assert (await client.frame(ref) == pixels_of(png())).all()


async def test_verify_finds_and_removes_wrong_bytes(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        ref = await client.put_image(png(), "run")
        await client.put_image(png(1), "run")
        assert await client.verify() == await client.verify([])
        frame = (await client.info(ref)).frame_digests[0]
        path = next((tmp_path / "media" / "blobs" / "frame").rglob(frame))
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))
        found = await client.verify([ref.digest])
        assert (found.checked, found.corrupt) == (2, (frame,))
        assert (await refused(client.frame(ref))).reason is Reason.MEDIA_LOST


async def test_decode_takes_a_stored_source_under_another_contract(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGBA", (1, 1), (0, 0, 0, 0)).save(out, "PNG")
    async with running(tmp_path) as service, open_channel(service.grpc) as channel:
        async with MediaClient.open(service.grpc) as client:
            source = (await client.put(out.getvalue(), "run")).source_digest
            request = media_pb2.DecodeRequest(
                source_digest=source, contract=media_pb2.DecodeContract(background="0000ff")
            )
            reply = await MediaStub(channel).Decode(request, timeout=10)
            assert (await client.frame(MediaRef(MediaKind.IMAGE, reply.ref.digest))).tolist() == [
                [[0, 0, 255]]
            ]


async def test_chunks_out_of_order_are_refused(tmp_path: Path) -> None:
    async def requests():  # type: ignore[no-untyped-def]
        yield media_pb2.PutRequest(header=media_pb2.PutHeader(run="run"))
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=b"x", offset=7))

    async with running(tmp_path) as service, open_channel(service.grpc) as channel:
        with pytest.raises(OmnifleetError) as caught, remote_errors():
            await MediaStub(channel).Put(requests(), timeout=5)
    assert caught.value.reason is Reason.INVALID_REQUEST


async def test_scopes_are_checked(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    async with running(tmp_path, tokens) as service:
        assert (
            await refused(MediaClient.open(service.grpc, "wrong").__aenter__())
        ).reason is Reason.UNAUTHENTICATED
        async with MediaClient.open(service.grpc, tokens.secret(Scope.ENV)) as client:
            await client.put_image(png(), "run")
            assert (await refused(client.verify())).reason is Reason.FORBIDDEN
        async with MediaClient.open(service.grpc, tokens.secret(Scope.OPERATOR)) as client:
            assert (await client.verify()).checked == 3


async def test_a_client_waits_for_a_service_that_is_not_up_yet(tmp_path: Path) -> None:
    async with running(tmp_path / "first") as service:
        address = service.grpc

    async def state() -> str:
        async with MediaClient.open(address, deadline_s=20) as client:
            return (await client.status()).state

    waiting = asyncio.create_task(state())
    async with running(tmp_path / "second", listen=address):
        assert await waiting == "serving"


async def test_a_clip_needs_a_named_sampling(tmp_path: Path) -> None:
    mp4 = b"\0\0\0\x18ftypisom"
    async with served(tmp_path) as client:
        error = await refused(client.put(mp4, "run", kind=MediaKind.VIDEO))
        assert (error.reason, error.knob) == (Reason.UNSUPPORTED, "contract.sampling")


async def test_hsh_13_timing_is_part_of_a_clip(tmp_path: Path) -> None:
    contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=4)
    async with served(tmp_path) as client:
        slow, fast = [
            await client.put(clip(fps), "run", kind=MediaKind.VIDEO, contract=contract) for fps in (5, 10)
        ]
    assert list(slow.info.timestamps_s) == pytest.approx([0, 0.6, 1.2, 1.8])
    assert list(fast.info.timestamps_s) == pytest.approx([0, 0.3, 0.6, 0.9])
    assert list(slow.info.frame_digests) == list(fast.info.frame_digests)
    assert slow.ref.digest != fast.ref.digest
    assert len([p for p in (tmp_path / "media" / "blobs" / "frame").rglob("*") if p.is_file()]) == 4


@pytest.mark.parametrize(("name", "limit"), [("frames", 4), ("seconds", 1.9)])
async def test_clips_are_limited(tmp_path: Path, name: str, limit: float) -> None:
    contract = media_pb2.DecodeContract(sampling="uniform@1")
    async with served(tmp_path, limits={name: limit}) as client:
        error = await refused(client.put(clip(5), "run", kind=MediaKind.VIDEO, contract=contract))
    assert (error.reason, error.knob) == (Reason.LIMIT_EXCEEDED, f"media.limits.{name}")


def clip(fps: int, count: int = 10) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), i * 20, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()
