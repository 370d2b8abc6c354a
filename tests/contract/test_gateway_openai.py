"""The official `openai` client against the gateway, with scripted workers: every dialect, streams, versions, identity."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from omnifleet.auth import Scope, Tokens
from tests.contract.gateway_world import (
    IM_END,
    PICTURE,
    token,
    v,
    write_tokenizer,
)
from tests.contract.openai_world import CLIP, PNG, served, text_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


async def test_chat_whole_and_streamed_sync_and_async(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (here, client, _):
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        whole = await client.chat.completions.create(**asked, seed=7, n=4, logprobs=True)
        said = [choice.message.content for choice in whole.choices]
        assert said == [text_of(7 + i, 3) for i in range(4)]
        logprobs = whole.choices[0].logprobs
        assert logprobs and [entry.logprob for entry in logprobs.content or ()] == [-0.5] * 3
        assert whole.usage and whole.usage.completion_tokens == 12

        streamed, usage = [""] * 4, None
        options: Any = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            **asked, seed=7, n=4, stream=True, stream_options=options
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == said and usage == whole.usage

        with openai.OpenAI(base_url=f"{here.http}/v1", api_key="none", timeout=120, max_retries=0) as plain:
            reply = await asyncio.to_thread(lambda: plain.chat.completions.create(**asked, seed=7))
            assert reply.choices[0].message.content == said[0]
            names = await asyncio.to_thread(lambda: [model.id for model in plain.models.list()])
            assert "policy" in names


async def test_completions_take_texts_and_ids_one_or_many(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        one = await client.completions.create(model="policy", prompt="ab", max_tokens=3, seed=1, logprobs=0)
        assert one.choices[0].text == text_of(1, 3) and one.choices[0].finish_reason == "length"
        logprobs = one.choices[0].logprobs
        assert logprobs and logprobs.token_logprobs == [-0.5] * 3 and logprobs.text_offset == [0, 1, 2]
        many = await client.completions.create(
            model="policy", prompt=[[5, 6], [7]], n=2, max_tokens=2, seed=1
        )
        assert [c.index for c in many.choices] == [0, 1, 2, 3] and len({c.text for c in many.choices}) == 4
        assert {tuple(r.tokens.token_ids) for r in worker.requests[1:]} == {(5, 6), (7,)}
        assert many.usage and (many.usage.prompt_tokens, many.usage.completion_tokens) == (3, 8)
        pieces = [""] * 2
        async for chunk in await client.completions.create(
            model="policy", prompt=["x", "y"], max_tokens=3, seed=1, stream=True
        ):
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
        assert pieces == [text_of(1, 3), text_of(2, 3)]
        empty: list[Any] = []
        bad: Any
        for bad in (empty, "", [[]], [-1], ["a", [1]] * 200, {"x": 1}):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="policy", prompt=bad)
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.completions.create(model="policy", prompt="a", logprobs=5)


async def test_responses_whole_and_streamed(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        asked: Any = {"model": "policy", "input": "hi", "instructions": "be brief", "max_output_tokens": 3}
        extra: Any = {"seed": 7, "return_token_ids": True}
        whole = await client.responses.create(**asked, extra_body=extra)
        assert whole.output_text == text_of(7, 3) and whole.status == "incomplete"
        assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
        [item] = whole.output
        fields = item.model_extra or {}
        assert fields["generation_token_ids"] == [token(7, i) for i in range(3)]
        assert fields["prompt_token_ids"] == list(worker.requests[0].tokens.token_ids)
        assert fields["generation_log_probs"] == [-0.5] * 3
        assert whole.usage and whole.usage.output_tokens == 3

        worker.replies += [[40, 41, IM_END]]
        kinds, text, final = [], "", None
        include: Any = ["message.output_text.logprobs"]
        async for event in await client.responses.create(**asked, include=include, stream=True):
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            final = event.response if event.type == "response.completed" else final
        assert final is not None and final.output_text == text and final.status == "completed"
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        async with client.responses.stream(**asked) as stream:  # the client's own folding accepts the events
            async for _ in stream:
                pass
            with pytest.raises(RuntimeError, match="completed"):
                await stream.get_final_response()
        worker.replies += [[40, IM_END]]
        async with client.responses.stream(**asked) as stream:
            assert (await stream.get_final_response()).output_text == "I"


async def test_pictures_and_clips_in_both_spellings(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        content: Any = [
            {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
            {"type": "video_url", "video_url": {"url": CLIP}},
            {"type": "text", "text": "what?"},
            {"type": "image_url", "image_url": {"url": PICTURE.url}},
        ]
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": content}], max_tokens=1
        )
        items: Any = [
            {"type": "input_image", "image_url": PNG, "detail": "auto"},
            {"type": "input_video", "video_url": CLIP},
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": PICTURE.url},
        ]
        await client.responses.create(model="policy", input=[{"role": "user", "content": items}])
        first, second = worker.requests
        assert [ref.kind for ref in first.media] == [1, 2, 1]
        assert [ref.digest for ref in first.media] == [ref.digest for ref in second.media]
        assert [id for id in first.tokens.token_ids if id in (258, 259)] == [258, 259, 258]
        sound: Any = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": [sound]}]
            )
        assert caught.value.status_code == 501 and "audio" in caught.value.message


async def test_a_session_key_is_all_an_environment_needs(tmp_path: Path, checkpoint: Path) -> None:
    tokens = Tokens.generate()
    async with served(tmp_path, checkpoint, tokens=tokens) as (here, client, worker):
        ask = {"run": "r9", "environment": "gym", "episode": "e3"}
        auth = {"authorization": f"Bearer {tokens.secret(Scope.ENV)}"}
        async with httpx.AsyncClient(base_url=here.http, headers=auth) as http:
            minted = (await http.post("/v1/sessions", json=ask)).json()
            assert minted["expires_unix"] > time.time()
        keyed = client.with_options(api_key=minted["key"])
        messages: Any = [{"role": "user", "content": "hi"}]
        await keyed.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        who = worker.requests[0].identity
        assert (who.run, who.environment, who.episode, who.session) == ("r9", "gym", "e3", minted["session"])
        with pytest.raises(openai.PermissionDeniedError):
            await keyed.chat.completions.create(
                model="policy", messages=messages, extra_headers={"x-omnifleet-run": "other"}
            )
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=minted["key"] + "x").models.list()
        in_header = {"x-omnifleet-session": minted["key"]}
        await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=1, extra_headers=in_header
        )
        assert worker.requests[1].identity == who
        async with httpx.AsyncClient(base_url=here.http) as http:
            bearer = {"authorization": f"Bearer {minted['key']}"}
            assert (await http.post("/v1/sessions", json=ask, headers=bearer)).status_code == 403


async def test_provenance_is_complete_on_request_in_every_dialect(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        content: Any = [{"type": "image_url", "image_url": {"url": PNG}}]
        full: Any = {"x-omnifleet-provenance": "full"}
        chat = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": content}],
            max_tokens=2,
            seed=3,
            extra_headers=full,
        )
        origin, own = (chat.model_extra or {})["omnifleet"], (chat.choices[0].model_extra or {})["omnifleet"]
        assert origin["engine"] == "scripted 1" and origin["logprobs_mode"] == "processed"
        assert origin["sampling"]["seed"] == 3 and origin["sampling"]["max_tokens"] == 2
        assert origin["media"] == [
            {"kind": "image", "digest": PICTURE.digest, "processor_fingerprint": "f" * 64}
        ]
        assert [(s["version"], s["worker"]) for s in own["weight_versions"]] == [("test/a:5", "w-1")] * 2
        message = chat.choices[0].message.model_extra or {}
        assert message["prompt_token_ids"] == list(worker.requests[0].tokens.token_ids)
        assert message["generation_token_ids"] == [token(3, 0), token(3, 1)]
        responses = await client.responses.create(
            model="policy", input="x", max_output_tokens=1, extra_headers=full
        )
        assert (responses.model_extra or {})["omnifleet"]["engine"] == "scripted 1"
        completion = await client.completions.create(
            model="policy", prompt=[5, 6], max_tokens=1, extra_body={"return_provenance": True}
        )
        assert (completion.model_extra or {})["omnifleet"]["prompts"][0]["prompt_token_ids"] == [5, 6]
        assert (completion.choices[0].model_extra or {})["omnifleet"]["generation_log_probs"] == [-0.5]


async def test_a_used_up_staleness_budget_is_429_until_the_trainer_moves_on(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with served(tmp_path, checkpoint) as (here, client, _):
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert await here.client.set_budget("default", 3, v(5)) == 0
        await client.chat.completions.create(**asked, n=2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**asked, n=2)
        assert (
            "max_staleness" in str(caught.value.body)
            and int(caught.value.response.headers["retry-after"]) >= 1
        )
        await client.chat.completions.create(**asked)
        assert await here.client.set_budget("default", 2, v(6)) == 0
        await client.chat.completions.create(**asked, n=2)


async def test_versions_and_identity_by_header_in_every_dialect(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint, request_timeout_s=0.5) as (_, client, worker):
        headers: Any = {"x-omnifleet-weight-version": "exact=test/a:5", "x-omnifleet-environment": "gym"}
        await client.responses.create(model="policy", input="x", max_output_tokens=1, extra_headers=headers)
        await client.completions.create(model="policy", prompt="x", max_tokens=1, extra_headers=headers)
        assert {r.weight_version.exact.number for r in worker.requests} == {5}
        assert {r.identity.environment for r in worker.requests} == {"gym"}
        for call in (
            client.responses.create(
                model="policy", input="x", extra_body={"weight_version": {"min": "test/a:6"}}
            ),
            client.completions.create(
                model="policy", prompt="x", extra_headers={"x-omnifleet-weight-version": "min=test/a:6"}
            ),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await call
            body: Any = caught.value.body
            assert caught.value.status_code == 503 and body["current_version"] == "test/a:5"
            assert body["retryable"] and body["code"] == "version_too_old"
