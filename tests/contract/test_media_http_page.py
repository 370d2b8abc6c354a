"""The media service's page: who sees it, and that nothing stored can act in it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

import omnifleet.login
from omnifleet.auth import Scope, Tokens
from omnifleet.login import COOKIE, LINK, make_ticket, read_ticket
from omnifleet.types import Digest, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.server.run import Running
from tests.contract.media_world import png, running

TOKENS = Tokens.generate()
BEARER = {"Authorization": f"Bearer {TOKENS.secret(Scope.ENV)}"}
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>'


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path, TOKENS) as made:
        yield made


@pytest.fixture
async def browser(service: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{service.http}", follow_redirects=True, timeout=60
    ) as client:
        yield client


def acting(text: str) -> list[str]:
    """Elements and attributes of a page that could run or style something."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("script", "style", "iframe", "object", "embed", "base"):
                found.append(tag)
            for name, value in attrs:
                local = (value or "/").startswith("/") and not (value or "").startswith("//")
                if (
                    name.startswith("on")
                    or name == "style"
                    or (name in ("src", "href", "action") and not local)
                ):
                    found.append(f"{tag} {name}={value}")

    Reader().feed(text)
    return found


async def log_in(browser: httpx.AsyncClient) -> httpx.Response:
    return await browser.get("/login", params={"ticket": make_ticket(TOKENS, Scope.ENV, LINK, 60)})


async def test_every_route_asks_for_a_token(service: Running, browser: httpx.AsyncClient) -> None:
    stored = (await browser.post("/v1/media", content=png(), headers=BEARER)).json()
    digest, frame = stored["digest"], stored["frames"][0]
    reads = [
        "/", f"/media/{digest}", f"/v1/media/{digest}", f"/v1/media/{digest}/preview.png", f"/v1/media/{digest}/sheet.png",
        f"/v1/media/{digest}/frames/0", f"/v1/blobs/frame/{frame}", f"/v1/blobs/source/{stored['source_digest']}",
    ]  # fmt: skip
    for path in reads:
        assert (await browser.get(path)).status_code == 401, path
        assert (await browser.get(path, headers={"Authorization": "Bearer wrong"})).status_code == 401, path
        assert (await browser.get(path, headers=BEARER)).status_code == 200, path
    for method in ("POST", "PUT"):
        assert (await browser.request(method, "/v1/media", content=png())).status_code == 401
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert (await browser.get(path, headers=BEARER)).status_code == 404, path


async def test_a_link_becomes_a_cookie_that_only_reads(browser: httpx.AsyncClient) -> None:
    digest = (await browser.post("/v1/media", content=png(), headers=BEARER)).json()["digest"]
    page = await log_in(browser)
    assert (page.status_code, page.url.path, page.url.query) == (200, "/", b"")  # the ticket left the address
    assert digest in page.text
    [set_cookie] = page.history[0].headers.get_list("set-cookie")
    assert "HttpOnly" in set_cookie
    assert "SameSite=lax" in set_cookie
    assert TOKENS.secret(Scope.ENV) not in set_cookie
    assert (await browser.get(f"/v1/media/{digest}/preview.png")).status_code == 200
    assert (await browser.post("/v1/media", content=png(1))).status_code == 401


async def test_a_link_is_good_once_and_not_for_long(
    browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = make_ticket(TOKENS, Scope.ENV, LINK, 60)
    assert (await browser.get("/login", params={"ticket": ticket})).status_code == 200
    browser.cookies.clear()
    refused = await browser.get("/login", params={"ticket": ticket})
    assert refused.status_code == 401
    assert "omnifleet media browse" in refused.text
    for forged in (
        "",
        "env",
        "env.99999999999.00",
        "nobody.1.2",
        ticket[:-1],
        ticket.replace("env", "operator"),
    ):
        assert (await browser.get("/login", params={"ticket": forged})).status_code == 401
    late = make_ticket(TOKENS, Scope.ENV, LINK, 60)
    now = time.time()
    monkeypatch.setattr(omnifleet.login.time, "time", lambda: now + 61)
    assert read_ticket(TOKENS, late, LINK) is None


def test_a_ticket_is_good_for_one_purpose_and_one_run() -> None:
    ticket = make_ticket(TOKENS, Scope.OPERATOR, LINK, 60)
    assert read_ticket(TOKENS, ticket, LINK) is Scope.OPERATOR
    assert read_ticket(TOKENS, ticket, COOKIE) is None
    assert read_ticket(Tokens.generate(), ticket, LINK) is None
    assert read_ticket(Tokens({}), ticket, LINK) is None


async def test_nothing_stored_can_act_in_the_page(service: Running, browser: httpx.AsyncClient) -> None:
    stored = (await browser.post("/v1/media", content=png(), headers=BEARER)).json()
    frame = Digest(stored["frames"][0])
    item = MediaObject(MediaKind.VIDEO, (frame, frame), 8, 6, (0, 1), {EVIL: EVIL, "name": EVIL})
    await service.library.index.write_object(item, Digest("ab" * 32), 1)
    await log_in(browser)
    for path in ("/", f"/media/{item.digest}", f"/media/{EVIL}", "/media/%22%3E%3Cscript%3E"):
        page = await browser.get(path)
        assert acting(page.text) == [], path
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "script-src" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
    assert acting(EVIL + f'<a href="{EVIL}" style="x">') != []  # the reader reads
    assert "&lt;script&gt;" in (await browser.get(f"/media/{item.digest}")).text


async def test_finding_by_digest(browser: httpx.AsyncClient) -> None:
    digest = (await browser.post("/v1/media", content=png(), headers=BEARER)).json()["digest"]
    await log_in(browser)
    for text in (digest, f" media://{digest} "):
        assert (await browser.get("/find", params={"digest": text})).url.path == f"/media/{digest}"
    assert (await browser.get("/find", params={"digest": "//example.org"})).url.path == "/"
    assert (await browser.get("/find", params={"digest": "ab" * 32})).status_code == 404
    assert (await browser.get("/find", params={"digest": "short"})).status_code == 400


async def test_the_page_without_tokens_and_without_media(tmp_path: Path) -> None:
    async with running(tmp_path) as service, httpx.AsyncClient(base_url=f"http://{service.http}") as browser:
        page = await browser.get("/")
        assert page.status_code == 200
        assert "Nothing is stored yet" in page.text
        style = await browser.get("/page.css")
        assert style.headers["content-type"].startswith("text/css")
