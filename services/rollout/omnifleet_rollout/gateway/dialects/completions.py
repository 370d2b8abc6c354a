"""POST /v1/completions: plain text or token ids in, one prompt or many, without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from omnifleet.client.rollout import Event, Rendered
from omnifleet.errors import invalid
from omnifleet_rollout.gateway.dialects.asking import Ask, ask
from omnifleet_rollout.gateway.dialects.asking import events as events_of
from omnifleet_rollout.gateway.dialects.fields import CommonFields, Refused, StreamOptions
from omnifleet_rollout.gateway.dialects.reply import Choice, Piece, Reply
from omnifleet_rollout.gateway.dialects.serving import Endpoint, Events, endpoint, streamed, whole
from omnifleet_rollout.gateway.gateway import Gateway

PATH = "/v1/completions"
MAX_PROMPTS = 256
"""Most prompts of one request."""
_REFUSED: Refused = {"response_format": (None, {"type": "text"})}
_WAITING = 256  # events of all prompts that may wait for a slow reader


class CompletionRequest(CommonFields):
    """The body. logprobs: 0 gives the sampled token's; more would need other tokens' too."""

    prompt: Any
    n: int | None = Field(1, ge=1)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=0)
    return_tokens_as_token_ids: bool = False

    @property
    def samples(self) -> int:
        """Replies to each prompt."""
        return self.n or 1

    @property
    def limit(self) -> int | None:
        """Longest reply asked for, tokens."""
        return self.max_tokens


class Completion:
    """All prompts' replies: choice index = prompt x n + sample."""

    def __init__(self, request: CompletionRequest, replies: Sequence[Reply]) -> None:
        self._request, self._replies = request, replies

    def fold(self, event: tuple[int, Event]) -> Piece | None:
        """Take one event of one prompt in."""
        at, inner = event
        return self._replies[at].take(inner)

    def take(self, event: tuple[int, Event]) -> Iterator[dict[str, Any]]:
        """Like `fold`; the chunks that a stream sends for the event."""
        at, piece = event[0], self.fold(event)
        if piece is not None:
            body = self._choice(at, piece.choice, piece.text, piece.token_ids, piece.logprobs, piece)
            yield {**self._head(), "choices": [body]}

    def end(self) -> Iterator[dict[str, Any]]:
        """The chunk after the last, if usage was asked for."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._head(), "choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The body after the last event."""
        choices = [
            self._choice(at, choice, choice.said, choice.token_ids, choice.logprobs)
            for at, reply in enumerate(self._replies)
            for choice in reply.choices
        ]
        origins = [reply.origin() for reply in self._replies]
        return {**self._head(), "choices": choices, "usage": self._usage(), "omnifleet": {"prompts": origins}}

    def _choice(
        self,
        at: int,
        choice: Choice,
        text: str,
        ids: list[int],
        logprobs: list[float],
        piece: Piece | None = None,
    ) -> dict[str, Any]:
        reply = self._replies[at]
        block = reply.block(piece or Piece(choice, text, ids, logprobs, choice.spans))
        return {
            "index": at * reply.sampling.n + choice.index,
            "text": text,
            "finish_reason": str(choice.finish) if choice.finish else None,
            "logprobs": self._logprobs(reply, ids, logprobs),
            "omnifleet": block,
        }

    def _logprobs(self, reply: Reply, ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        texts = [reply.renderer.token_text(id) for id in ids]
        names = [f"token_id:{id}" for id in ids] if self._request.return_tokens_as_token_ids else texts
        offsets = [0, *accumulate(map(len, texts))][: len(texts)]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(reply.prompt_tokens for reply in self._replies)
        made = sum(reply.made_tokens for reply in self._replies)
        cached = sum(reply.cached_tokens for reply in self._replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self) -> dict[str, Any]:
        first = self._replies[0]
        return {
            "id": first.id,
            "object": "text_completion",
            "created": first.created,
            "model": first.model,
        }


def serve(gateway: Gateway) -> Endpoint:
    """What serves PATH."""
    return endpoint(CompletionRequest, _REFUSED, partial(_answer, gateway))


async def _answer(gateway: Gateway, http: Request, request: CompletionRequest) -> Response:
    asked = ask(gateway, http, request)
    renderer = await gateway.renderer.get(gateway.config.request_timeout_s)
    prompts = [
        renderer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in _prompts(request.prompt)
    ]
    replies = [Reply("cmpl", request, asked.sampling, renderer, asked.model) for _ in prompts]
    completion = Completion(request, replies)
    streams = [
        events_of(
            gateway,
            _own(asked, i),
            reply.id,
            Rendered(ids, (), ""),
            with_ids=reply.with_ids,
            stream=bool(request.stream),
        )
        for i, (ids, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    events = merged(streams) if len(streams) > 1 else _alone(streams[0])
    if request.stream:
        return await streamed(events, completion.take, completion.end)
    return await whole(events, completion.fold, completion.whole)


def _own(asked: Ask, index: int) -> Ask:
    """Each prompt's samples have seeds of their own."""
    seed, n = asked.sampling.seed, asked.sampling.n
    if seed is None or index == 0:
        return asked
    return replace(asked, sampling=replace(asked.sampling, seed=(seed + index * n) % (1 << 63)))


def _prompts(prompt: Any) -> list[Any]:
    """A prompt is a text or a list of token ids; the field is one of these or a list of them."""
    prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"prompt: {len(prompts)} prompts, allowed are 1 to {MAX_PROMPTS}")
    for i, one in enumerate(prompts):
        if not (isinstance(one, str) and one) and not (_is_ids(one) and one):
            raise invalid(f"prompt {i} must be a text or a list of token ids, and not be empty")
    return prompts


def _is_ids(value: Any) -> bool:
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    return bool(min(value) >= 0 and max(value) < 1 << 32)


async def _alone(stream: Events) -> AsyncGenerator[tuple[int, Event], None]:
    """What `merged` makes of one stream, without a task and a queue."""
    async with aclosing(stream):
        async for event in stream:
            yield 0, event


async def merged(streams: Sequence[Events]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of many streams with their stream's index, as they come. Closing it closes all; the first error ends it."""
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue(_WAITING)

    async def pump(index: int, stream: Events) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  it is raised again below, in the reader
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
