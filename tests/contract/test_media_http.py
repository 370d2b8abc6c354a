"""The media service over HTTP."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from omnifleet.auth import Scope, Tokens
from tests.contract.media_world import pixels_of, png, running

TOKENS = Tokens.generate()


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running(tmp_path, TOKENS, limits={"source_bytes": 1 << 20}) as service:
        headers = {"Authorization": f"Bearer {TOKENS.secret(Scope.ENV)}"}
        async with httpx.AsyncClient(base_url=f"http://{service.http}", headers=headers) as client:
            yield client


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


async def test_a_token_is_needed_for_media_and_none_for_health(http: httpx.AsyncClient) -> None:
    nobody = {"Authorization": ""}
    assert (await http.post("/v1/media", content=png(), headers=nobody)).status_code == 401
    assert (await http.get("/readyz", headers=nobody)).json() == {"ready": True}
    assert "omnifleet_media_puts_total 0.0" in (await http.get("/metrics", headers=nobody)).text
