"""The same source over every route (tests/contract/every_route.py) gives the same object, or is refused for the same reason.

The rules of decoding are tested one by one in tests/unit/test_media_*; here each field case takes every way in.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnifleet.address import track_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind, MediaRef
from omnifleet_media.ingest.frame_manifest import FrameManifest
from tests.contract.every_route import (
    ROUTES,
    Contract,
    Put,
    Route,
    Service,
    answered,
    by_grpc,
    by_upload,
    encoded,
    named,
    of,
    png,
    route,
    service,
)
from tests.media_files import clip, greys, h264, sound
from tests.unit.test_media_clips import animation, trimmed, turned

__all__ = ["route", "service"]
pytestmark = pytest.mark.asyncio(loop_scope="module")

RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


# ---------------------------------------------------------------------- what the cases are made of


def oriented() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    return png(of((RED, GREEN, BLUE), (YELLOW, WHITE, BLACK)), exif=exif)


def bomb() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10))) + chunk(b"IEND", b"")


NOISE = encoded(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), "JPEG", quality=90
)
GIF = animation("GIF", [of([c] * 2, [c] * 2) for c in (RED, GREEN, BLUE)], [100, 300, 100])
PIXEL = png(of([RED]))
HALVES = np.zeros((32, 64, 3), np.uint8)
HALVES[:, :32], HALVES[:, 32:] = RED, BLUE
B_FRAMES = h264(greys(24))
FFV1 = clip(greys(30))
LONG = clip(greys(300, (16, 16)), 30)
AAC = sound(np.zeros((1, 44_100), np.float32), 44_100, codec="aac", container="mp4")
TONE = (0.5 * np.sin(np.arange(8_000) / 5)).astype(np.float32)[None]


def uniform(data: bytes, num_frames: int = 0, **options: Any) -> Put:
    return Put(data, MediaKind.VIDEO, Contract(sampling="uniform@1", num_frames=num_frames, **options))


def picked(data: bytes, *indices: int) -> Put:
    return Put(data, MediaKind.VIDEO, Contract(sampling="indices@1", indices=indices))


def of_long(count: int) -> tuple[list[int], list[float]]:
    """Greys and times of `count` frames of LONG."""
    indices = [int(i) for i in np.floor(np.linspace(0, 299, count))]
    return [10 * i % 256 for i in indices], [i / 30 for i in indices]


PICTURES = {
    "IMG-01 orientation": (Put(oriented()), of((YELLOW, RED), (WHITE, GREEN), (BLACK, BLUE))),
    "IMG-04 alpha": (Put(encoded(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))), of([(255, 127, 127)])),
    "IMG-06 sixteen bits": (
        Put(encoded(Image.fromarray(np.array([[0, 257, 32_896, 65_535]], np.uint16)))),
        of([(v, v, v) for v in (0, 1, 128, 255)]),
    ),
    "IMG-08 animation": (Put(GIF), of([RED] * 2, [RED] * 2)),
    "IMG-10 whole": (Put(NOISE), np.asarray(Image.open(io.BytesIO(NOISE)))),
    "IMG-19 bilevel": (Put(encoded(Image.new("1", (2, 2), 1))), of([WHITE] * 2, [WHITE] * 2)),
    **{
        f"IMG-19 {mode}": (Put(encoded(Image.new(mode, (2, 2), colour))), of([seen] * 2, [seen] * 2))
        for mode, colour, seen in (
            ("L", 7, (7, 7, 7)),
            ("LA", (7, 255), (7, 7, 7)),
            ("I;16", 257, (1, 1, 1)),
            ("RGB", GREEN, GREEN),
            ("RGBA", (*GREEN, 255), GREEN),
        )
    },
    "IMG-19 grey JPEG": (
        Put(encoded(Image.new("L", (2, 2), 255), "JPEG")),
        of([WHITE] * 2, [WHITE] * 2),
    ),
    "IMG-19 palette": (Put(encoded(Image.new("RGB", (2, 2), BLUE).quantize(4))), of([BLUE] * 2, [BLUE] * 2)),
    "IMG-20 junk behind": (Put(PIXEL + bytes(1 << 20)), of([RED])),
    "HSH-05 black": (
        Put(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 0))), contract=Contract(background="000000")),
        of([BLACK]),
    ),
}
CLIPS: dict[str, tuple[Put, Sequence[int], Sequence[float]]] = {
    "VID-01": (uniform(clip(greys(13), 4), 5), [0, 30, 60, 90, 120], [0, 0.75, 1.5, 2.25, 3]),
    "VID-05 all": (uniform(B_FRAMES), [10 * i for i in range(24)], [i / 10 for i in range(24)]),
    "VID-05 last": (picked(B_FRAMES, 23), [230], [2.3]),
    "VID-06": (picked(B_FRAMES, 23, 0, 12, 12, 5), [230, 0, 120, 120, 50], [2.3, 0, 1.2, 1.2, 0.5]),
    "VID-09 one frame": (uniform(clip(greys(1)), temporal_patch=2), [0], [0]),
    "VID-09 two frames": (uniform(clip(greys(2), 30), fps=1, temporal_patch=2), [0], [0]),
    "VID-13": (uniform(clip(greys(5, (65, 49)))), [0, 10, 20, 30, 40], [i / 10 for i in range(5)]),
    "VID-15 count": (uniform(LONG, 16, temporal_patch=2), *of_long(16)),
    "VID-15 the count is fewer": (uniform(LONG, 4, fps=1, temporal_patch=2), *of_long(4)),
    "VID-15 the rate is fewer": (uniform(LONG, 16, fps=1, temporal_patch=2), *of_long(10)),
    "edit list": (picked(trimmed(B_FRAMES, 0.5, 1000), 0, 9), [50, 140], [0, 0.9]),
    "nemotron_vl": (
        Put(B_FRAMES, MediaKind.VIDEO, Contract(sampling="nemotron_vl@1", num_frames=4, temporal_patch=2)),
        [0, 80, 150, 230],
        [0, 0.8, 1.5, 2.3],
    ),
}
REFUSED = {
    "IMG-10 truncated": (Put(NOISE[: len(NOISE) * 6 // 10]), Reason.INVALID_MEDIA, "truncated"),
    "IMG-12 bomb": (Put(bomb()), Reason.LIMIT_EXCEEDED, "20000 x 20000"),
    "IMG-20 page": (Put(b"<html><body>not found</body></html>"), Reason.INVALID_MEDIA, "<html>"),
    "IMG-20 drawing": (Put(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), Reason.INVALID_MEDIA, "<svg"),
    "VID-05 beyond": (picked(B_FRAMES, 24), Reason.INVALID_REQUEST, "0 to 23"),
    "SEC-01 path": (Put(b"/etc/passwd"), Reason.INVALID_MEDIA, "known are"),
    "SEC-01 file URL": (Put(b"file:///etc/passwd"), Reason.INVALID_MEDIA, "known are"),
    "SEC-03 address": (Put(b"http://169.254.169.254/latest"), Reason.INVALID_MEDIA, "known are"),
    "SEC-05 number": (Put(b"http://2130706433/"), Reason.INVALID_MEDIA, "known are"),
    "VID-09 nothing": (uniform(b""), Reason.INVALID_MEDIA, "empty|nothing|starts with|ended"),
    "VID-09 no pictures": (uniform(B_FRAMES[:200]), Reason.INVALID_MEDIA, "clip"),
    "VID-11 sound": (uniform(AAC), Reason.INVALID_MEDIA, "no_video_stream"),
    "no sound": (Put(B_FRAMES, MediaKind.AUDIO), Reason.INVALID_MEDIA, "no_audio_stream"),
    "HEIC": (Put(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"), Reason.UNSUPPORTED, "HEIC"),
    "unnamed sampling": (Put(B_FRAMES, MediaKind.VIDEO), Reason.UNSUPPORTED, "sampling"),
    "SEC-06 playlist": (uniform(b"#EXTM3U\nfile:///etc/hostname\n"), Reason.INVALID_MEDIA, "known are"),
}


# ---------------------------------------------------------------------- every case on every route


@pytest.mark.parametrize("case", PICTURES)
async def test_a_picture_is_the_same_on_every_route(service: Service, route: Route, case: str) -> None:
    put, expected = PICTURES[case]
    ref = await route(service, put)
    assert ref == await by_grpc(service, put)
    pixels = await service.client.frame(ref)
    assert pixels.shape == expected.shape
    assert (pixels == expected).all()


@pytest.mark.parametrize("case", CLIPS)
async def test_a_clip_is_the_same_on_every_route(service: Service, route: Route, case: str) -> None:
    put, expected, times = CLIPS[case]
    ref = await route(service, put)
    assert ref == await by_grpc(service, put)
    info = await service.client.info(ref)
    frames = await service.client.frames(ref)
    assert info.ref.kind is MediaKind.VIDEO
    assert len(frames) == len(info.timestamps_s)
    for frame, level in zip(frames, expected, strict=True):
        np.testing.assert_allclose(frame, level, atol=2)
    assert list(info.timestamps_s) == pytest.approx(times, abs=1e-3)


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_on_every_route(service: Service, route: Route, case: str) -> None:
    put, reason, words = REFUSED[case]
    before = (await service.client.status()).counters["objects"]
    with pytest.raises(OmnifleetError, match=words) as caught:
        await route(service, put)
    assert caught.value.reason is reason
    assert (await service.client.status()).counters["objects"] == before


async def test_img_10_the_whole_file_is_taken_after_a_truncated_one(service: Service, route: Route) -> None:
    noise = np.random.default_rng(1 + next(service.numbers)).integers(0, 256, (64, 64, 3), np.uint8)
    fresh = encoded(Image.fromarray(noise), "JPEG")
    with pytest.raises(OmnifleetError):
        await route(service, Put(fresh[: len(fresh) * 6 // 10]))
    assert (await service.client.frame(await route(service, Put(fresh)))).shape == (64, 64, 3)


async def test_img_20_nothing_is_nothing(service: Service, route: Route) -> None:
    with pytest.raises(OmnifleetError) as caught:
        await route(service, Put(b""))
    assert caught.value.reason is Reason.INVALID_MEDIA


async def test_img_03_what_was_turned_is_not_turned_again(service: Service, route: Route) -> None:
    once = await route(service, Put(oriented()))
    stored = np.array(await service.client.frame(once))
    assert await route(service, Put(png(stored))) == once


async def test_img_08_slots_do_not_mix(service: Service, route: Route) -> None:
    still = await by_grpc(service, Put(png(of([RED] * 2, [RED] * 2))))
    for _ in range(5):
        assert await route(service, Put(GIF)) == still
        played = await service.client.info(await route(service, uniform(GIF)))
        assert list(played.timestamps_s) == pytest.approx([0, 0.1, 0.4])
        assert len(set(played.frame_digests)) == 3


async def test_vid_03_a_turned_clip_is_upright(service: Service, route: Route) -> None:
    ref = await route(service, uniform(turned(h264([HALVES] * 2)), 1))
    frame = (await service.client.frame(ref)).astype(int)
    assert frame.shape == (64, 32, 3)
    assert (abs(frame[5] - RED) <= 4).all()
    assert (abs(frame[-5] - BLUE) <= 4).all()


async def test_vid_06_a_batch_is_its_single_reads_bit_for_bit(service: Service, route: Route) -> None:
    for indices in (range(24), (11, 12, 13), (23, 0, 12, 12, 5)):
        batch = await service.client.info(await route(service, picked(B_FRAMES, *indices)))
        single = [await service.client.info(await route(service, picked(B_FRAMES, i))) for i in indices]
        assert batch.frame_digests == tuple(
            one.frame_digests[0] for one in single
        )  # a digest is of the pixels


async def test_vid_07_a_cut_clip_is_sampled_over_what_is_there(service: Service, route: Route) -> None:
    cut = FFV1[: len(FFV1) * (600 - next(service.numbers) % 8) // 1000]  # new to the service, most times
    info = await service.client.info(await route(service, uniform(cut, 8)))
    assert info.facts["truncated"] == "true"
    total, indices = int(info.facts["total_frames"]), info.facts["indices"]
    assert 8 <= total < 30
    assert indices == ",".join(str(int(i)) for i in np.floor(np.linspace(0, total - 1, 8)))
    assert [int(f[0, 0, 0]) for f in await service.client.frames(info.ref)] == [
        10 * int(i) % 256 for i in indices.split(",")
    ]
    assert list(info.timestamps_s) == pytest.approx([int(i) / 10 for i in indices.split(",")])


async def test_hsh_01_size_counts(service: Service, route: Route) -> None:
    data = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    wide, high = [await route(service, Put(png(data.reshape(shape)))) for shape in ((1, 2, 3), (2, 1, 3))]
    assert wide != high
    assert [(await service.client.frame(ref)).shape for ref in (wide, high)] == [(1, 2, 3), (2, 1, 3)]


async def test_hsh_03_other_bytes_of_one_picture_are_one_object(service: Service, route: Route) -> None:
    from PIL.PngImagePlugin import PngInfo

    solid, note = np.full((8, 8, 3), (1, 2, 3), np.uint8), PngInfo()
    note.add_text("comment", "hello")
    files = [png(solid, compress_level=0), png(solid, compress_level=9), png(solid, pnginfo=note)]
    assert len(set(files)) == 3
    assert len({(await route(service, Put(file))).digest for file in files}) == 1


async def test_hsh_05_an_opaque_picture_is_one_object_for_every_background(
    service: Service, route: Route
) -> None:
    put = [Put(PIXEL, contract=Contract(background=colour)) for colour in ("ffffff", "000000")]
    assert len({(await route(service, one)).digest for one in put}) == 1


async def test_hsh_07_counts_of_frames_do_not_mix(service: Service, route: Route) -> None:
    for _ in range(2):
        refs = [await route(service, uniform(LONG, n)) for n in (8, 16)]
        assert [len((await service.client.info(ref)).frame_digests) for ref in refs] == [8, 16]


async def test_hsh_08_options_of_clips_do_not_touch_pictures(service: Service, route: Route) -> None:
    ref = await route(service, Put(PIXEL))
    decodes = (await service.client.status()).counters["decodes"]
    assert await route(service, Put(PIXEL, contract=Contract(num_frames=16))) == ref
    assert (await service.client.status()).counters["decodes"] == decodes


async def test_hsh_11_a_thousand_pixels_have_a_thousand_addresses_on_all_routes(service: Service) -> None:
    ways = list(ROUTES.values())

    async def there_and_back(numbers: range) -> list[str]:
        digests = []
        for i in numbers:
            pixel = of([(i % 256, i // 256, 7)])
            ref = await ways[i % len(ways)](service, Put(png(pixel)))
            assert (await service.client.frame(ref) == pixel).all()
            digests.append(ref.digest)
        return digests

    parts = await asyncio.gather(*(there_and_back(range(i, 1_000, 16)) for i in range(16)))
    assert len(set(itertools.chain(*parts))) == 1_000


async def test_hsh_13_timing_counts_and_frames_are_shared(service: Service, route: Route) -> None:
    slow, fast = [
        await service.client.info(await route(service, uniform(clip(greys(10), fps), 4))) for fps in (5, 10)
    ]
    assert slow.ref != fast.ref
    assert slow.frame_digests == fast.frame_digests
    assert list(slow.timestamps_s) == pytest.approx([0, 0.6, 1.2, 1.8])
    assert list(fast.timestamps_s) == pytest.approx([0, 0.3, 0.6, 0.9])


async def test_a_track_is_the_same_on_every_route(service: Service, route: Route) -> None:
    put = Put(sound(TONE, 16_000), MediaKind.AUDIO, Contract(sample_rate=16_000))
    ref = await route(service, put)
    assert ref == await by_grpc(service, put)
    info, samples = await service.client.info(ref), await service.client.track(ref)
    assert (info.ref.kind, info.samples, info.sample_rate) == (MediaKind.AUDIO, 8_000, 16_000)
    assert (info.width, info.height, info.bytes) == (0, 0, 32_000)
    assert info.frame_digests == (track_digest(samples, 16_000),)
    assert abs(samples - TONE[0]).max() < 2 / 32_768
    assert not samples.flags.writeable


async def test_sound_and_pictures_of_one_file_are_two_objects(service: Service, route: Route) -> None:
    heard = await route(service, Put(AAC, MediaKind.AUDIO))
    assert (await service.client.info(heard)).ref.kind is MediaKind.AUDIO
    with pytest.raises(OmnifleetError, match="no track"):
        await service.client.track(await route(service, Put(PIXEL)))


async def test_a_frame_manifest_is_its_pictures_on_every_route(service: Service, route: Route) -> None:
    paths = [service.folder / f"{next(service.numbers)}.png" for _ in range(4)]
    for i, path in enumerate(paths):
        path.write_bytes(png(np.full((4, 6, 3), 50 * i, np.uint8)))
    contract = Contract(sampling="nemotron_vl@1", num_frames=4, temporal_patch=2)
    ref = await route(service, Put(FrameManifest.of(paths).encode(), MediaKind.VIDEO, contract))
    assert [int(f.max()) for f in await service.client.frames(ref)] == [0, 50, 100, 150]
    assert (await service.client.info(ref)).timestamps_s == (0, 1, 2, 3)
    outside = FrameManifest.of(["/etc/hostname"]).encode()
    with pytest.raises(OmnifleetError) as caught:
        await route(service, Put(outside, MediaKind.VIDEO, contract))
    assert caught.value.knob == "media.sources.roots"
    paths[1].write_bytes(png(np.full((4, 6, 3), 7, np.uint8)))
    again = await route(service, Put(FrameManifest.of(paths).encode(), MediaKind.VIDEO, contract))
    assert [int(f.max()) for f in await service.client.frames(again)] == [0, 7, 100, 150]


GOOD = (
    "data:image/png;base64,",
    "DATA:image/png;BASE64,",
    "data:image/png;charset=utf-8;base64,",
    "data:;base64,",
)
BAD = (
    "data:image/png",
    "data:image/png;base64",
    "data:image/png,abc",
    "data:image/png;base64,",
    "data:;base64,%%%%",
)


@pytest.mark.parametrize("by_name", [False, True])
async def test_img_17_data_urls(service: Service, by_name: bool) -> None:
    """As the bytes that are put, and as the URL that names the source; over gRPC and HTTP."""

    async def both(url: str) -> list[MediaRef]:
        put = Put(url.encode())
        if not by_name:
            return [await by_grpc(service, put), await by_upload(service, put)]
        body = json.dumps({"url": url, "run": "run"})
        sent = await service.http.post(
            "/v1/media", content=body, headers={"content-type": "application/json"}
        )
        return [await named(service, put, url), answered(sent, put)]

    expected = await by_grpc(service, Put(PIXEL))
    for head in GOOD:
        assert await both(head + base64.b64encode(PIXEL).decode()) == [expected] * 2
    for url in BAD:
        with pytest.raises(OmnifleetError) as caught:
            await both(url)
        assert caught.value.reason is Reason.INVALID_MEDIA
