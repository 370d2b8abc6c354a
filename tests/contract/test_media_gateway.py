"""SEC-01, SEC-03, SEC-05 and SEC-06 through the gateway: whatever route a picture's name takes, the media service alone reads
it, by its rules. A real gateway and a real media service; only the engine is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from omnifleet.auth import OPEN
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.codec import identity_to_wire
from omnifleet.wire.errors import HTTP_STATUS, remote_errors
from omnifleet_rollout.gateway.media_in import MediaIn
from omnifleet_rollout.gateway.renderer import RendererLoader
from tests.contract.gateway_world import WHO, World, world, write_tokenizer
from tests.contract.media_world import png, running
from tests.contract.picture_server import PictureServer, moved, ok, picture_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

Way = Callable[["Asked", str], Awaitable[str]]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


class Asked:
    """A gateway beside a media service, what to ask of it, and a server that pictures may be at."""

    def __init__(
        self,
        folder: Path,
        here: World,
        http: httpx.AsyncClient,
        stub: rollout_pb2_grpc.RolloutStub,
        server: PictureServer,
    ) -> None:
        self.folder, self.here, self.http, self.stub, self.server = folder, here, http, stub, server

    async def refused(self, url: str) -> OmnifleetError:
        """How a picture's name is refused: in the same words whatever way it came."""
        errors = []
        for way in WAYS.values():
            with pytest.raises(OmnifleetError) as caught:
                await way(self, url)
            errors.append(caught.value)
        assert len({(e.reason, e.message, e.knob, e.retryable) for e in errors}) == 1, url
        return errors[0]

    async def posted(self, path: str, body: dict[str, Any]) -> str:
        reply = await self.http.post(path, json={**body, "return_media": True})
        told = reply.json()
        if reply.status_code == 200:
            (media,) = told["omnifleet"]["media"]
            return str(media["digest"])
        error = told["error"]
        reason = Reason(error["code"])
        assert reply.status_code == HTTP_STATUS[reason]
        raise OmnifleetError(reason, error["message"], error["retryable"], error["knob"])


def messages(url: str, *, of_tool: bool = False) -> list[dict[str, Any]]:
    """A question about a picture, or a tool's answer with one."""
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    if not of_tool:
        return [{"role": "user", "content": parts}]
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]


async def by_chat(asked: Asked, url: str) -> str:
    return await asked.posted("/v1/chat/completions", {"messages": messages(url), "max_tokens": 1})


async def by_tool(asked: Asked, url: str) -> str:
    body = {"messages": messages(url, of_tool=True), "max_tokens": 1}
    return await asked.posted("/v1/chat/completions", body)


async def by_responses(asked: Asked, url: str) -> str:
    parts = [{"type": "input_image", "image_url": url}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 1}
    return await asked.posted("/v1/responses", body)


async def by_function_output(asked: Asked, url: str) -> str:
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": url}],
        },
    ]
    return await asked.posted("/v1/responses", {"input": items, "max_output_tokens": 1})


async def by_render(asked: Asked, url: str) -> str:
    (ref,) = (await asked.here.client.render(messages(url), identity=WHO)).media
    return ref.digest


async def by_generate(asked: Asked, url: str) -> str:
    request = rollout_pb2.GenerateRequest(
        request_id="r",
        identity=identity_to_wire(WHO),
        chat=rollout_pb2.ChatPrompt(messages_json=json.dumps(messages(url))),
        sampling=rollout_pb2.Sampling(n=1, max_tokens=1, top_p=1.0),
    )
    with remote_errors():
        events = [event async for event in asked.stub.Generate(request, timeout=60)]
    (media,) = next(event.prompt.media for event in events if event.WhichOneof("event") == "prompt")
    return str(media.digest)


WAYS: dict[str, Way] = {
    "chat": by_chat,
    "tool result": by_tool,
    "Responses": by_responses,
    "function output": by_function_output,
    "gRPC Render": by_render,
    "gRPC Generate": by_generate,
}


@asynccontextmanager
async def asking(
    folder: Path, checkpoint: Path, allowed: Callable[[Path, PictureServer], dict[str, Any]]
) -> AsyncIterator[Asked]:
    """A media service with what is `allowed` of a folder and a server, and a gateway with a worker."""
    for name in ("media", "root"):
        (folder / name).mkdir()
    (folder / "root" / "a.png").write_bytes(png(1))
    (folder / "root" / "link.png").symlink_to(folder / "secret.txt")
    (folder / "secret.txt").write_text("the secret text")
    async with picture_server() as server:
        server.answers["/a.png"] = ok(png(1))
        sources = allowed(folder / "root", server)
        async with running(folder / "media", sources=sources) as service:
            media = MediaIn(folder, service.grpc, OPEN)
            try:
                async with (
                    world(folder, renderer=RendererLoader(checkpoint), put=media.put) as here,
                    httpx.AsyncClient(base_url=here.http, timeout=120) as http,
                    grpc.aio.insecure_channel(here.address) as channel,
                ):
                    await here.worker("w-1", 5)
                    yield Asked(folder, here, http, rollout_pb2_grpc.RolloutStub(channel), server)
            finally:
                await media.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> AsyncIterator[Asked]:
    """Nothing may be named."""
    async with asking(tmp_path_factory.mktemp("closed"), checkpoint, lambda *_: {}) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def public(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> AsyncIterator[Asked]:
    """One folder and every public address, on the server's port too."""

    def allowed(root: Path, server: PictureServer) -> dict[str, Any]:
        return {"roots": [root], "hosts": ["*", f"*:{server.port}"]}

    async with asking(tmp_path_factory.mktemp("public"), checkpoint, allowed) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> AsyncIterator[Asked]:
    """The one server, on loopback."""

    def allowed(root: Path, server: PictureServer) -> dict[str, Any]:
        return {"roots": [root], "hosts": [f"127.0.0.1:{server.port}"], "networks": ["127.0.0.0/8"]}

    async with asking(tmp_path_factory.mktemp("local"), checkpoint, allowed) as made:
        yield made


async def test_what_is_allowed_is_read_on_every_way(local: Asked) -> None:
    urls = (str(local.folder / "root" / "a.png"), local.server.url("/a.png"))
    digests = {await way(local, url) for way in WAYS.values() for url in urls}
    assert len(digests) == 1


async def test_SEC_01_no_file_is_opened_for_a_caller_of_the_gateway(closed: Asked, public: Asked) -> None:
    for asked in (closed, public):
        told = set()
        for text in (
            "/etc/passwd",
            "file:///etc/passwd",
            "../../etc/passwd",
            str(asked.folder / "secret.txt"),
            f"file://{asked.folder / 'secret.txt'}",
            str(asked.folder / "absent.txt"),
            str(asked.folder / "root" / "link.png"),
        ):
            error = await asked.refused(text)
            assert (error.reason, error.knob) == (Reason.INVALID_REQUEST, "media.sources.roots"), text
            assert "secret text" not in error.message
            told.add(error.message.replace(repr(text.removeprefix("file://")), "it"))
        assert len(told) == 1  # whether or not the file is there


async def test_SEC_03_internal_addresses_are_refused_before_any_connection(
    closed: Asked, public: Asked
) -> None:
    names = ("127.0.0.1", "169.254.169.254", "10.0.0.1", "[::1]", "0.0.0.0", "localhost")
    for asked, knob in ((closed, "media.sources.hosts"), (public, "media.sources.networks")):
        for name in names:
            error = await asked.refused(asked.server.url("/a.png", name))
            assert (error.reason, error.knob, error.retryable) == (Reason.INVALID_REQUEST, knob, False)
        assert asked.server.connections == 0


async def test_SEC_05_ambiguous_urls_are_refused(public: Asked) -> None:
    port = public.server.port
    for text in (
        f"http://127.0.0.1:{port}\\@example.com/",
        f"http://2130706433:{port}/",
        f"http://0x7f.1:{port}/",
        f"http://127.0.%30.1:{port}/",
        f"http://[::ffff:127.0.0.1]:{port}/",
        f"http://[::ffff:7f00:1]:{port}/",
        f"http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
        f"http://[64:ff9b::7f00:1]:{port}/",
        f"http://example.com@127.0.0.1:{port}/",
    ):
        assert (await public.refused(text)).reason is Reason.INVALID_REQUEST, text
    assert public.server.connections == 0


async def test_SEC_06_redirects_are_checked_whoever_asked(local: Asked) -> None:
    async with picture_server() as inner:
        inner.answers["/a.png"] = ok(png())
        to = {
            "/host": inner.url("/a.png"),
            "/metadata": "http://169.254.169.254/latest",
            "/file": "file:///etc/passwd",
            "/mapped": f"http://[::ffff:127.0.0.1]:{inner.port}/a.png",
        }
        for path, target in to.items():
            local.server.answers[path] = moved(target)
            assert (await local.refused(local.server.url(path))).reason is Reason.INVALID_REQUEST, path
            assert local.server.asked.count(path) == len(WAYS)
        assert inner.connections == 0


async def test_SEC_06_a_plain_prompt_names_no_picture(local: Asked) -> None:
    """/v1/completions takes text and token ids: a URL in it is text."""
    before, url = local.server.connections, local.server.url("/a.png")
    reply = await local.http.post("/v1/completions", json={"prompt": url, "max_tokens": 1})
    assert reply.status_code == 200
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    reply = await local.http.post("/v1/completions", json={"prompt": parts, "max_tokens": 1})
    assert reply.status_code == 400
    assert local.server.connections == before
