"""Field cases of the OpenAI routes, by the official client: API-01 to API-09, RPC-03, RPC-08."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Sampling
from tests.contract.gateway_world import (
    IM_END,
    PROMPT,
    WHO,
    token,
    until,
    write_tokenizer,
)
from tests.contract.openai_world import served


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


async def test_API_01_n_with_a_seed_gives_different_replies_of_their_own_lengths_again_and_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        lengths = [2, 5, 3, 4]
        scripts = [[token(7 + i, k) for k in range(n)] for i, n in enumerate(lengths)]
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 4, "seed": 7}
        seen = []
        for stream in (False, True, False):
            by_seed = dict(zip(range(7, 11), scripts, strict=True))
            honest = worker._reply

            async def reply(request: Any, honest: Any = honest, by_seed: Any = by_seed) -> AsyncIterator[Any]:
                worker.replies.insert(
                    0, by_seed[request.sampling.seed]
                )  # taken at the next line's first step
                async for event in honest(request):
                    yield event

            worker._reply = reply  # type: ignore[method-assign]
            texts = [""] * 4
            if stream:
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
            else:
                for choice in (await client.chat.completions.create(**asked)).choices:
                    texts[choice.index] = choice.message.content or ""
            worker._reply = honest  # type: ignore[method-assign]
            seen.append(texts)
        assert [len(text) for text in seen[0]] == lengths and len(set(seen[0])) == 4
        assert seen[0] == seen[1] == seen[2]


async def test_API_03_a_stop_string_across_tokens_is_never_shown(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (here, client, worker):
        await until(lambda: here.gateway.renderer.now is not None)
        encode = here.gateway.renderer.now.encode
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stop": "blue"}
        worker.replies += [encode("red blue"), encode("red blue")]
        whole = await client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("red ", "stop")
        pieces = [
            choice.delta.content
            async for chunk in await client.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
            if choice.delta.content
        ]
        assert "".join(pieces) == "red " and not any("b" in piece for piece in pieces)


async def test_API_05_known_fields_are_honoured_or_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        messages: Any = [{"role": "user", "content": "hi"}]
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_completion_tokens=3
        )
        assert (
            reply.choices[0].finish_reason == "length" and reply.usage and reply.usage.completion_tokens == 3
        )
        refused: list[tuple[Any, str]] = [
            ({"logit_bias": {"5": 1}}, "logit_bias"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"frequency_penalty": 0.5}, "frequency_penalty"),
            ({"extra_body": {"mm_processor_kwargs": {"max_pixels": 1}}}, "mm_processor_kwargs"),
        ]
        for fields, named in refused:
            with pytest.raises(openai.BadRequestError, match=named):
                await client.chat.completions.create(model="policy", messages=messages, **fields)
        for fields in ({"previous_response_id": "r"}, {"background": True}, {"truncation": "auto"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
                await client.responses.create(model="policy", input="x", **fields)
        assert len(worker.requests) == 1
        raw = await client.responses.with_raw_response.create(
            model="policy", input="x", max_output_tokens=1, extra_body={"frob\nnicate": 1}
        )
        assert raw.headers["x-omnifleet-warning"] == "unknown fields were ignored: frob\\nnicate"


async def test_API_09_an_end_token_at_the_limit_is_a_stop_and_stays_in_the_ids_only(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        worker.replies += [[40, 41, IM_END]]
        reply = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            extra_body={"return_token_ids": True},
        )
        choice = reply.choices[0]
        assert choice.finish_reason == "stop" and choice.message.content == "IJ"
        assert (choice.message.model_extra or {})["generation_token_ids"] == [40, 41, IM_END]


async def test_RPC_03_hanging_up_and_deadlines_reach_the_worker_in_every_dialect(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with served(tmp_path, checkpoint) as (here, client, worker):
        worker.go = asyncio.Semaphore(0)
        chat: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        session: Any = {"x-omnifleet-session": "gone"}

        def kept() -> int:
            return len(here.gateway.conversations._sessions.memory("default", "gone").turns)

        calls: list[Any] = [
            lambda: client.chat.completions.create(**chat, extra_headers=session),
            lambda: client.chat.completions.create(**chat, stream=True, extra_headers=session),
            lambda: client.completions.create(model="policy", prompt=["a", "b"], extra_headers=session),
            lambda: client.responses.create(model="policy", input="x", extra_headers=session),
        ]
        for call in calls:
            task = asyncio.create_task(call())
            await until(lambda: worker.running > 0)
            worker.go.release()  # it has a token when its reader goes
            await until(lambda: worker.go.locked())
            task.cancel()
            outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, openai.AsyncStream):  # it had begun: leave it
                await outcome.close()
            await until(lambda: worker.running == 0 and here.gateway.dispatcher.requests == 0)
        late = {**session, "x-omnifleet-timeout-s": "0.5"}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**chat, extra_headers=late)
        assert caught.value.status_code == 504
        await until(lambda: worker.running == 0)
        assert kept() == 0, "no reply was whole, so no turn is remembered"
        with pytest.raises(openai.BadRequestError, match="timeout"):
            await client.chat.completions.create(**chat, extra_headers={"x-omnifleet-timeout-s": "soon"})
        worker.go = asyncio.Semaphore(1 << 30)
        await client.chat.completions.create(**chat, extra_headers=session)
        assert kept() == 1, "a whole one is"


async def test_a_priority_reaches_the_worker_in_every_dialect(tmp_path: Path, checkpoint: Path) -> None:
    async with served(tmp_path, checkpoint) as (_, client, worker):
        body: Any = {"priority": 3, "max_tokens": 1}
        chat: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        await client.chat.completions.create(**chat, extra_body={"max_tokens": 1})
        await client.chat.completions.create(**chat, extra_body=body)
        await client.completions.create(model="policy", prompt="hi", extra_body=body)
        await client.responses.create(
            model="policy", input="hi", extra_body={"priority": 3, "max_output_tokens": 1}
        )
        assert [request.priority for request in worker.requests] == [0, 3, 3, 3]


async def test_RPC_08_a_clients_mistakes_are_its_own_by_http_and_grpc(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with served(tmp_path, checkpoint, request_timeout_s=1.0) as (here, client, worker):
        messages: Any = [{"role": "user", "content": "hi"}]
        broken = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png,abc%"}}],
        }
        worker_says: list[tuple[OmnifleetError, int]] = [
            (OmnifleetError(Reason.NOT_FOUND, "unknown media"), 404),
            (OmnifleetError(Reason.MEDIA_LOST, "evicted"), 404),
            (OmnifleetError(Reason.PROMPT_TOO_LONG, "4000 tokens"), 400),
            (OmnifleetError(Reason.UNSUPPORTED, "no clips"), 501),
        ]
        for error, status in worker_says:
            worker.refuse.append(error)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="policy", messages=messages)
            assert caught.value.status_code == status
            worker.refuse.append(error)
            with pytest.raises(OmnifleetError) as refused:
                await here.client.generate(
                    prompt_token_ids=PROMPT, sampling=Sampling(), identity=WHO, deadline_s=5
                )
            assert refused.value.reason is error.reason
        for fields in ({"messages": [broken]}, {"messages": messages, "n": 0}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="policy", **fields)
        with pytest.raises(OmnifleetError) as refused:
            await here.client.generate(
                prompt_token_ids=PROMPT, sampling=Sampling(n=0), identity=WHO, deadline_s=5
            )
        assert refused.value.reason is Reason.INVALID_REQUEST
        worker.refuse += [retryable(Reason.FENCED, "the weights are not whole") for _ in range(50)]
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="policy", messages=messages)
        assert caught.value.status_code == 503
