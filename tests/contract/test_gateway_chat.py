"""The HTTP door: chat completions, refusals by name, streaming, pictures, versions, auth, the operator's view."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from omnifleet.auth import OPEN, Scope, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Identity, MediaKind
from omnifleet_rollout.gateway.dialects.serving import Stream
from omnifleet_rollout.gateway.media_in import MediaIn
from omnifleet_rollout.gateway.renderer import Renderer, RendererLoader
from tests.contract.gateway_world import PICTURE, World, token, until, v, world, write_tokenizer

PNG = "data:image/png;base64," + base64.b64encode(b"any bytes: the media service decodes").decode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@asynccontextmanager
async def chatting(
    path: Path, checkpoint: Path, tokens: Tokens = OPEN, **settings: Any
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    async with world(path, tokens=tokens, renderer=RendererLoader(checkpoint), **settings) as here:
        headers = {"authorization": f"Bearer {tokens.secret(Scope.ENV) or 'none'}"}
        async with httpx.AsyncClient(base_url=here.http, headers=headers, timeout=120) as http:
            yield here, http


def chat(text: str = "What?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "seed": 3, **fields}


def said(renderer: Renderer, seed: int, count: int) -> str:
    return renderer.decode([token(seed, i) for i in range(count)])


async def test_a_reply_carries_text_usage_and_on_request_exact_tokens(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        one = await here.worker("w-1", 5)
        reply = await http.post("/v1/chat/completions", json=chat(n=2, logprobs=True, return_token_ids=True))
        body = reply.json()
        renderer = Renderer.load(checkpoint)
        prompt = renderer.tokenizer.encode(
            "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
        assert reply.status_code == 200 and "x-omnifleet-warning" not in reply.headers
        assert body["omnifleet"]["prompt_token_ids"] == prompt == list(one.requests[0].tokens.token_ids)
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 8,
            "total_tokens": len(prompt) + 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        for choice in body["choices"]:
            seed = 3 + choice["index"]
            assert (
                choice["message"]["content"] == said(renderer, seed, 4)
                and choice["finish_reason"] == "length"
            )
            own, said_by_model = choice["omnifleet"], choice["message"]
            assert said_by_model["prompt_token_ids"] == prompt
            assert said_by_model["generation_token_ids"] == [token(seed, i) for i in range(4)]
            assert said_by_model["generation_log_probs"] == [-0.5] * 4
            assert own["weight_versions"][0] == {"version": "test/a:5", "start": 0, "end": 1, "worker": "w-1"}
            assert [c["logprob"] for c in choice["logprobs"]["content"]] == [-0.5] * 4


async def test_a_stream_says_the_same_in_pieces(tmp_path: Path, checkpoint: Path) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        await here.worker("w-1")
        whole = (await http.post("/v1/chat/completions", json=chat(n=2))).json()
        fields = chat(n=2, stream=True, return_token_ids=True, stream_options={"include_usage": True})
        text, ids, ends = ["", ""], [list[int](), list[int]()], {}
        async with http.stream("POST", "/v1/chat/completions", json=fields) as reply:
            lines = [line async for line in reply.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert chunks[0]["omnifleet"]["prompt_token_ids"]
        for chunk in chunks[1:]:
            for choice in chunk["choices"]:
                text[choice["index"]] += choice["delta"].get("content", "")
                ids[choice["index"]] += choice["omnifleet"]["generation_token_ids"]
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
        assert text == [c["message"]["content"] for c in whole["choices"]]
        assert ids == [[token(3 + k, i) for i in range(4)] for k in range(2)] and ends == {
            0: "length",
            1: "length",
        }
        assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_pictures_become_one_placeholder_each_and_digests_on_the_wire(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        one = await here.worker("w-1")
        parts = [
            {"type": "image_url", "image_url": {"url": PNG}},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": {"url": PICTURE.url}},
        ]
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "max_tokens": 1, "return_media": True}
        reply = await http.post("/v1/chat/completions", json=body)
        assert [m["digest"] for m in reply.json()["omnifleet"]["media"]] == [PICTURE.digest] * 2
        request = one.requests[0]
        assert [m.digest for m in request.media] == [PICTURE.digest] * 2
        assert list(request.tokens.token_ids).count(258) == 2
        rendered = await here.client.render(messages, identity=Identity("test"))
        assert rendered.token_ids == list(request.tokens.token_ids) and len(rendered.media) == 2


@pytest.mark.parametrize(
    "url",
    [
        "http://host/a.png",
        "https://host/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "media://xyz",
        "data:image/png;base64,@@",
    ],
)
async def test_other_picture_sources_are_refused(tmp_path: Path, checkpoint: Path, url: str) -> None:
    async with chatting(tmp_path, checkpoint) as (_, http):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        reply = await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}
        )
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_media"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_schema"}, "logit_bias": {"5": 1}}, "logit_bias, response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "placeholder"),
        ({"weight_version": {"min": "nonsense"}}, "nonsense"),
        ({"weight_version": {"min": "r/l:1", "exact": "r/l:1"}}, "min, exact"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, checkpoint: Path, fields: dict[str, Any], named: str
) -> None:
    async with chatting(tmp_path, checkpoint) as (_, http):
        reply = await http.post("/v1/chat/completions", json=chat() | fields)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"]


async def test_harmless_and_unknown_fields_are_accepted_the_unknown_with_a_warning(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        await here.worker("w-1")
        fields = chat(tools=[], presence_penalty=0, response_format={"type": "text"}, user="me", frobnicate=1)
        reply = await http.post("/v1/chat/completions", json=fields)
        assert reply.status_code == 200
        assert reply.headers["x-omnifleet-warning"] == "unknown fields were ignored: frobnicate"


async def test_versions_by_body_and_header_and_bare_number(tmp_path: Path, checkpoint: Path) -> None:
    async with chatting(tmp_path, checkpoint, request_timeout_s=0.4) as (here, http):
        await here.fleet.announce_version(v(5))
        one = await here.worker("w-1", 5)
        for given in ({"min": 5}, {"exact": "test/a:5"}):
            reply = await http.post("/v1/chat/completions", json=chat(weight_version=given))
            assert reply.status_code == 200, reply.text
        assert one.requests[0].weight_version.min.number == 5
        assert one.requests[1].weight_version.exact.lineage == "a"
        headers = {"x-omnifleet-weight-version": "min=test/a:6"}
        reply = await http.post("/v1/chat/completions", json=chat(), headers=headers)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["retryable"]) == (503, "version_too_old", True)
        assert error["current_version"] == "test/a:5"


async def test_overload_is_429_with_retry_after(tmp_path: Path, checkpoint: Path) -> None:
    async with chatting(tmp_path, checkpoint, queue_per_run=2) as (here, http):
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(http.post("/v1/chat/completions", json=chat(n=2, max_tokens=1)))
        await until(lambda: one.running == 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here.gateway.conversations, "open", None)  # who is refused is not rendered first
            replies = [await http.post("/v1/chat/completions", json=chat()) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [429, 429]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        for _ in range(2):
            one.go.release()
        assert (await task).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_reaches_the_worker(tmp_path: Path, checkpoint: Path, stream: bool) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        one = await here.worker("w-1", paused=True)
        one.go.release()
        call = asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=stream)))
        await until(lambda: here.gateway.counters.count("tokens") == 1)
        call.cancel()
        await until(lambda: one.running == 0)
        await until(lambda: here.gateway.dispatcher.requests == 0)


async def test_a_failure_inside_a_stream_is_an_error_event_and_no_done(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        one = await here.worker("w-1")
        one.fail_at[2] = OmnifleetError(Reason.MEDIA_LOST, "evicted")
        reply = await http.post("/v1/chat/completions", json=chat(stream=True))
        lines = [line for line in reply.text.splitlines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "media_lost"
        one.fail_at[2] = retryable(Reason.MEDIA_LOST, "evicted")
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 404


async def test_stop_strings_cut_the_text_and_session_headers_reach_the_worker(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with chatting(tmp_path, checkpoint) as (here, http):
        one = await here.worker("w-1")
        text = said(Renderer.load(checkpoint), 3, 4)
        headers = {"x-omnifleet-session": "s1", "x-omnifleet-run": "r1"}
        reply = await http.post("/v1/chat/completions", json=chat(stop=text[2:]), headers=headers)
        assert reply.json()["choices"][0]["message"]["content"] == text[:2]
        assert list(one.requests[0].sampling.stop) == [text[2:]]
        assert (one.requests[0].identity.run, one.requests[0].identity.session) == ("r1", "s1")


async def test_who_may_come_in_and_what_operators_see(tmp_path: Path, checkpoint: Path) -> None:
    async with chatting(tmp_path, checkpoint, Tokens.generate()) as (here, http):
        assert (await http.get("/readyz")).status_code == 503
        await here.worker("w-1", 2)
        await here.fleet.scale(3)
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
        await until(lambda: here.gateway.ready)
        assert (await http.get("/readyz")).status_code == 200
        fleet = (await http.get("/v1/fleet")).json()
        assert fleet["desired"] == 3 and fleet["runs"]["default"]["samples_finished"] == 1
        assert [(w["id"], w["state"], w["version"]) for w in fleet["workers"]] == [
            ("w-1", "ready", "test/a:2")
        ]
        names = [m["id"] for m in (await http.get("/v1/models")).json()["data"]]
        assert "policy" in names and "scripted" in names
        reply = await http.post("/v1/chat/completions", json=chat(model="gpt-x"))
        assert reply.status_code == 404 and "scripted" in reply.json()["error"]["message"]
        assert b"omnifleet_gateway_samples_finished_total 1.0" in (await http.get("/metrics")).content
        for path in ("/v1/fleet", "/v1/models"):
            assert (await http.get(path, headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_gateway_without_a_checkpoint_says_what_to_set(tmp_path: Path) -> None:
    async with world(tmp_path) as here, httpx.AsyncClient(base_url=here.http) as http:
        error = (await http.post("/v1/chat/completions", json=chat())).json()["error"]
        assert (error["code"], error["knob"]) == ("model_missing", "model.path")


async def test_a_client_that_left_before_the_first_byte_leaves_no_events_open() -> None:
    closed: list[str] = []

    async def pieces(name: str) -> AsyncGenerator[Any, None]:
        try:
            yield name
            yield name
        finally:
            closed.append(name)

    async def receive() -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()

    async def gone(message: Any) -> None:
        raise OSError("the client left")

    events = pieces("events")
    await anext(events)
    with pytest.raises(Exception):  # noqa: B017 - starlette's own
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        await Stream(events, pieces("lines"))(scope, receive, gone)
    assert closed == ["events"]


async def test_a_put_that_fails_late_leaves_the_new_connection_alone(tmp_path: Path) -> None:
    pictures = MediaIn(tmp_path, "", OPEN)
    new = cast(MediaClient, object())

    class Old:
        async def put(self, data: bytes, run: str, **_: Any) -> None:
            pictures._client = new  # another picture has connected again
            raise retryable(Reason.UNAVAILABLE, "the media service went away")

    pictures._client = cast(MediaClient, Old())
    with pytest.raises(OmnifleetError, match="went away"):
        await pictures.put(PNG, MediaKind.IMAGE, "run")
    assert pictures._client is new
