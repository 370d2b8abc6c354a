"""The media service over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from omnifleet.auth import Scope, Tokens
from omnifleet.report.pictures import fetch_pictures
from omnifleet_media.server.run import Running
from tests.contract.media_world import clip_of_pictures, pixels_of, png, running

TOKENS = Tokens.generate()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path, TOKENS, limits={"source_bytes": 1 << 20}) as made:
        yield made


@pytest.fixture
async def http(service: Running) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKENS.secret(Scope.ENV)}"}
    async with httpx.AsyncClient(base_url=f"http://{service.http}", headers=headers, timeout=60) as client:
        yield client


def clear_pixel() -> bytes:
    out = io.BytesIO()
    Image.new("RGBA", (1, 1), (0, 0, 0, 0)).save(out, "PNG")
    return out.getvalue()


def shown(response: httpx.Response) -> np.ndarray:
    assert response.headers["content-type"] == "image/png"
    return np.asarray(Image.open(io.BytesIO(response.content)))


async def test_raw_and_form_uploads_give_the_same_object(http: httpx.AsyncClient) -> None:
    raw = await http.post("/v1/media", content=png())
    form = await http.put("/v1/media", files={"file": ("a.png", png(), "text/plain")})
    assert raw.status_code == form.status_code == 200
    body = raw.json()
    assert body["url"] == f"media://{body['digest']}"
    assert (body["width"], body["height"], body["decoded"]) == (8, 6, True)
    assert form.json() == {**body, "decoded": False}
    facts = (await http.get(f"/v1/media/{body['digest']}")).json()
    assert facts["frames"] == body["frames"]


async def test_frames_are_lossless_and_previews_are_small(http: httpx.AsyncClient) -> None:
    data = png(size=(600, 300))
    digest = (await http.post("/v1/media", content=data)).json()["digest"]
    assert (shown(await http.get(f"/v1/media/{digest}/frames/0")) == pixels_of(data)).all()
    assert shown(await http.get(f"/v1/media/{digest}/preview.png")).shape == (256, 512, 3)
    assert (await http.get(f"/v1/media/{digest}/frames/1")).status_code == 404


@pytest.mark.parametrize("form", [False, True])
async def test_an_upload_that_is_too_large_is_413(http: httpx.AsyncClient, form: bool) -> None:
    data = bytes(4 << 20)
    response = await http.post("/v1/media", **({"files": {"file": data}} if form else {"content": data}))
    assert response.status_code == 413
    assert response.json()["error"]["knob"] == "media.limits.source_bytes"


async def test_bad_requests_are_told_apart(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/media", content=b"<html>")).json()["error"]["code"] == "invalid_media"
    assert (await http.post("/v1/media", files={"picture": b"x"})).status_code == 400
    assert (await http.get("/v1/media/" + "ab" * 32)).status_code == 404
    assert (await http.get("/v1/media/..%2f..%2fetc")).status_code in (400, 404)


async def test_options_of_an_upload_come_by_query_and_by_json(http: httpx.AsyncClient) -> None:
    query = {
        "run": "r",
        "lease_owner": "gym",
        "lease_ttl_ms": "60000",
        "durable": "true",
        "background": "000000",
    }
    body = (await http.post("/v1/media", content=clear_pixel(), params=query)).json()
    assert body["lease"]["expires_unix_ms"] > 0
    assert shown(await http.get(f"/v1/media/{body['digest']}/frames/0")).tolist() == [[[0, 0, 0]]]
    url = "data:image/png;base64," + base64.b64encode(clear_pixel()).decode()
    asked = {"url": url, "contract": {"background": "000000"}}
    assert (await http.post("/v1/media", json=asked)).json()["digest"] == body["digest"]
    for wrong in ({"durable": "perhaps"}, {"backgroundd": "1"}, {"num_frames": "x"}, {"background": "red"}):
        answer = await http.post("/v1/media", content=png(), params=wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), wrong


async def test_stored_parts_are_read_by_range(http: httpx.AsyncClient) -> None:
    data = png()
    stored = (await http.post("/v1/media", content=data)).json()
    url = f"/v1/blobs/source/{stored['source_digest']}"
    whole = await http.get(url)
    tag = whole.headers["etag"]
    assert (whole.content, whole.headers["accept-ranges"]) == (data, "bytes")
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-disposition"].startswith("attachment")
    size = len(data)
    for asked, start, end in (("bytes=0-3", 0, 4), ("bytes=10-", 10, size), ("bytes=-7", size - 7, size)):
        part = await http.get(url, headers={"Range": asked})
        assert (part.status_code, part.content) == (206, data[start:end])
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert part.headers["content-length"] == str(end - start)
    beyond = await http.get(url, headers={"Range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["content-range"], beyond.content) == (
        416,
        f"bytes */{size}",
        b"",
    )
    for ignored in ("bytes=3-1", "bytes=0-1,4-5", "pages=1-2"):
        assert (await http.get(url, headers={"Range": ignored})).content == data
    stale = await http.get(url, headers={"Range": "bytes=0-3", "If-Range": '"other"'})
    assert (stale.status_code, stale.content) == (200, data)
    assert (await http.get(url, headers={"If-None-Match": tag, "Range": "bytes=0-3"})).status_code == 304
    head = await http.head(url, headers={"Range": "bytes=0-3"})
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(size), b"")
    pixels = await http.get(f"/v1/blobs/frame/{stored['frames'][0]}", headers={"Range": "bytes=0-2"})
    assert pixels.content == pixels_of(data)[0, 0].tobytes()
    assert (await http.get(f"/v1/blobs/frame/{'ab' * 32}")).status_code == 404
    assert (await http.get(f"/v1/blobs/secrets/{'ab' * 32}")).status_code == 404


async def test_a_resumed_download_is_the_file(http: httpx.AsyncClient) -> None:
    out = io.BytesIO()
    Image.radial_gradient("L").resize((900, 500)).convert("RGB").save(
        out, "PNG"
    )  # more than one chunk of pixels
    data = out.getvalue()
    frame = (await http.post("/v1/media", content=data)).json()["frames"][0]
    got = bytearray()
    while len(got) < 900 * 500 * 3:
        part = await http.get(
            f"/v1/blobs/frame/{frame}", headers={"Range": f"bytes={len(got)}-{len(got) + 499_999}"}
        )
        assert part.status_code == 206
        got += part.content
    assert bytes(got) == pixels_of(data).tobytes()


async def test_previews_are_drawn_to_size_and_not_again(http: httpx.AsyncClient) -> None:
    digest = (await http.post("/v1/media", content=png(size=(600, 300)))).json()["digest"]
    small = await http.get(f"/v1/media/{digest}/preview.png?side=64")
    assert shown(small).shape == (32, 64, 3)
    again = {"If-None-Match": small.headers["etag"]}
    assert (await http.get(f"/v1/media/{digest}/preview.png?side=64", headers=again)).status_code == 304
    assert (await http.get(f"/v1/media/{digest}/preview.png?side=65", headers=again)).status_code == 200
    for side in (0, 100000):
        assert (await http.get(f"/v1/media/{digest}/preview.png?side={side}")).status_code == 400


async def test_a_contact_sheet_shows_every_frame_of_a_short_clip(
    service: Running, http: httpx.AsyncClient
) -> None:
    item = await clip_of_pictures(service, range(8), (64, 48), TOKENS.secret(Scope.ENV))
    sheet = shown(await http.get(f"/v1/media/{item.digest}/sheet.png"))
    assert sheet.shape == (4 + 2 * (48 + 16 + 4), 4 + 6 * (64 + 4), 3)  # six columns, two rows
    for i in range(8):
        x, y = 4 + i % 6 * 68, 4 + i // 6 * 68
        assert (sheet[y : y + 48, x : x + 64] == pixels_of(png(i, (64, 48)))).all()
        assert (
            shown(await http.get(f"/v1/media/{item.digest}/frames/{i}")) == pixels_of(png(i, (64, 48)))
        ).all()


async def test_a_contact_sheet_of_a_long_clip_is_a_choice(service: Running, http: httpx.AsyncClient) -> None:
    item = await clip_of_pictures(service, [i % 3 for i in range(100)], (400, 200), TOKENS.secret(Scope.ENV))
    sheet = shown(await http.get(f"/v1/media/{item.digest}/sheet.png"))
    assert sheet.shape == (4 + 4 * (96 + 16 + 4), 4 + 6 * (192 + 4), 3)  # 24 cells, none wider than 192


async def test_a_report_has_a_picture_of_every_medium_also_when_the_service_is_gone(
    service: Running, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    clip = (await clip_of_pictures(service, range(8), (64, 48), TOKENS.secret(Scope.ENV))).digest
    picture = (await http.post("/v1/media", content=png())).json()["digest"]
    wanted, secret = [clip, picture, "ab" * 32], TOKENS.secret(Scope.OPERATOR)
    ask = partial(fetch_pictures, tmp_path / "report", wanted, secret=secret)
    found = await asyncio.to_thread(ask, http=service.http)
    assert found.keys() == {clip, picture}, "what is lost is left out"
    sizes = {digest: Image.open(io.BytesIO(data)).size for digest, data in found.items()}
    assert sizes[picture] == (8, 6) and sizes[clip][0] > 6 * 64, "a clip is its contact sheet"
    assert ask(http="") == found and ask(http="127.0.0.1:1") == found


async def test_payloads_are_counted_at_the_boundary(http: httpx.AsyncClient) -> None:
    data = png(size=(100, 100))
    for _ in range(4):
        stored = (await http.post("/v1/media", content=data)).json()
    await http.get(f"/v1/blobs/frame/{stored['frames'][0]}")
    text = (await http.get("/metrics")).text
    counted = {
        (boundary, kind): float(value)
        for boundary, kind, value in re.findall(
            r'omnifleet_media_payload_(?:bytes|counts)_total\{boundary="(\w+)",kind="(\w+)"\} (\S+)', text
        )
    }
    assert counted["http_put", "logical_media"] == 4 * 30_000
    assert counted["http_put", "physical_media"] == 30_000
    assert counted["http_put", "estimated_saved"] == 3 * 30_000
    assert counted["http_put", "calls"] == 4
    assert counted["http_put", "serialized"] > 4 * len(data)
    assert counted["http_get", "logical_media"] == 30_000
    assert 30_000 <= counted["http_get", "serialized"] < 31_000
    assert 'omnifleet_media_payload_physical_to_logical{boundary="http_put"} 0.25' in text
    assert "omnifleet_media_dedup_ratio 4.0" in text
    assert "omnifleet_media_alias_hit_rate 0.75" in text


async def test_a_token_is_needed_for_media_and_none_for_health(http: httpx.AsyncClient) -> None:
    nobody = {"Authorization": ""}
    assert (await http.post("/v1/media", content=png(), headers=nobody)).status_code == 401
    assert (await http.get("/readyz", headers=nobody)).json() == {"ready": True}
    assert "omnifleet_media_puts_total 0.0" in (await http.get("/metrics", headers=nobody)).text
