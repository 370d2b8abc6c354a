"""POST /v1/chat/completions, the OpenAI dialect: streaming and not, with exact tokens and versions on request."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from omnifleet.client.rollout import Done, Event, Failed, PromptSeen, Tokens, event_from_wire
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.http import error_response
from omnifleet.types import FinishReason, Sampling, VersionSpan
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import bound_to_wire, identity_to_wire, sampling_to_wire
from omnifleet_rollout.gateway.chat_request import ChatRequest, bound_of, identity_of, parse
from omnifleet_rollout.gateway.gateway import Gateway
from omnifleet_rollout.gateway.renderer import Renderer
from omnifleet_rollout.gateway.text import TextStream

BODY_BYTES = 96 << 20
"""Largest body: pictures may come inline."""


@dataclass(slots=True)
class Choice:
    """One sample of the reply as it comes."""

    index: int
    text: TextStream
    content: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0


class Chat:
    """One chat request: its events folded into choices. The same object makes whole replies and chunks."""

    def __init__(self, request: ChatRequest, sampling: Sampling, renderer: Renderer, model: str) -> None:
        self.request, self.sampling, self.renderer, self.model = request, sampling, renderer, model
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.seen: PromptSeen | None = None
        self.choices = [Choice(i, TextStream(renderer.decode, sampling.stop)) for i in range(sampling.n)]

    def whole(self) -> dict[str, Any]:
        """The reply after the last event."""
        choices = []
        for choice in self.choices:
            body: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.content, "refusal": None},
                "finish_reason": str(choice.finish),
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "omnifleet": self._provenance(choice.token_ids, choice.logprobs, choice.spans),
            }
            choices.append(body)
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": self.usage(), "omnifleet": self._prompt()}

    def take(self, event: Event) -> dict[str, Any] | None:
        """Fold one event in; the chunk that a stream sends for it, None for nothing. Raises a sample's failure."""
        match event:
            case PromptSeen():
                self.seen = event
                head = self._head("chat.completion.chunk")
                roles = [
                    {"index": c.index, "delta": {"role": "assistant"}, "finish_reason": None}
                    for c in self.choices
                ]
                return {**head, "choices": roles, "omnifleet": self._prompt()}
            case Tokens():
                return self._take_tokens(self.choices[event.sample], event)
            case Done():
                return self._take_end(self.choices[event.sample], event)
            case Failed():
                raise event.error

    def _take_tokens(self, choice: Choice, event: Tokens) -> dict[str, Any]:
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        text = choice.text.push(event.token_ids)
        choice.content += text
        return self._chunk(choice, {"content": text}, event.token_ids, event.logprobs, event.spans)

    def _take_end(self, choice: Choice, event: Done) -> dict[str, Any]:
        choice.finish, choice.spans, choice.cached = (
            event.finish_reason,
            event.spans,
            event.cached_prompt_tokens,
        )
        text = choice.text.flush()
        choice.content += text
        return self._chunk(choice, {"content": text} if text else {}, [], [], event.spans)

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, Any],
        ids: list[int],
        logprobs: list[float],
        spans: list[VersionSpan],
    ) -> dict[str, Any]:
        body = {
            "index": choice.index,
            "delta": delta,
            "finish_reason": str(choice.finish) if choice.finish else None,
            "logprobs": self._logprobs(ids, logprobs),
            "omnifleet": self._provenance(ids, logprobs, spans),
        }
        return {**self._head("chat.completion.chunk"), "choices": [body]}

    def usage(self) -> dict[str, Any]:
        """Tokens in and out. The prompt counts once, its cached part is that of the sample that reused most."""
        prompt = self.seen.prompt_tokens if self.seen else 0
        made = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": max(c.cached for c in self.choices)},
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk under stream_options.include_usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _prompt(self) -> dict[str, Any]:
        seen = self.seen
        if seen is None:
            return {"request_id": self.id}
        body: dict[str, Any] = {
            "request_id": self.id,
            "prompt_hash": seen.prompt_hash,
            "logprobs_mode": str(seen.logprobs_mode),
        }
        if self.request.return_token_ids:
            body["prompt_token_ids"] = seen.token_ids
        if self.request.return_media:
            body["media"] = [{"kind": str(ref.kind), "digest": ref.digest} for ref in seen.media]
        return body

    def _provenance(self, ids: list[int], logprobs: list[float], spans: list[VersionSpan]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "weight_versions": [
                {"version": str(s.version), "start": s.start, "end": s.end, "worker": s.worker} for s in spans
            ]
        }
        if self.request.return_token_ids:
            body |= {"generation_token_ids": ids, "generation_log_probs": logprobs}
        return body

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        content = []
        for id, logprob in zip(ids, logprobs, strict=True):
            token = str(self.renderer.tokenizer.decode([id], skip_special_tokens=False))
            content.append(
                {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def router(gateway: Gateway) -> APIRouter:
    """Routes of this dialect."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "omnifleet"}
            for name in gateway.models()
        ]
        return {"object": "list", "data": data}

    @routes.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        request, unknown = parse(await read_body(http))
        reply = await _answer(gateway, http, request)
        if unknown:
            reply.headers["x-omnifleet-warning"] = f"unknown fields were ignored: {', '.join(unknown)}"
        return reply

    return routes


async def _answer(gateway: Gateway, http: Request, request: ChatRequest) -> Response:
    names = gateway.models()
    if request.model is not None and request.model not in names:
        raise invalid(
            f"model {request.model!r} is not served; known: {', '.join(names)}", reason=Reason.NOT_FOUND
        )
    renderer = await gateway.renderer.get(gateway.config.request_timeout_s)
    chat = Chat(request, request.sampling(gateway.defaults), renderer, request.model or names[0])
    wire = _wire_request(gateway, http, chat)
    if request.stream:
        return await _stream(gateway, chat, wire)
    return await _until_gone(http, _fold(gateway, chat, wire))


def _wire_request(gateway: Gateway, http: Request, chat: Chat) -> rollout_pb2.GenerateRequest:
    request = chat.request
    target = gateway.fleet.view().target_version
    return rollout_pb2.GenerateRequest(
        request_id=chat.id,
        identity=identity_to_wire(identity_of(request, http.headers)),
        chat=rollout_pb2.ChatPrompt(
            messages_json=json.dumps(request.messages),
            template_kwargs_json=json.dumps(request.chat_template_kwargs),
        ),
        sampling=sampling_to_wire(chat.sampling),
        weight_version=bound_to_wire(bound_of(request, http.headers, target)),
        priority=request.priority,
        return_prompt_token_ids=request.return_token_ids,
    )


async def _events(gateway: Gateway, wire: rollout_pb2.GenerateRequest) -> AsyncGenerator[Event, None]:
    async with aclosing(gateway.generate(wire)) as events:
        async for event in events:
            yield event_from_wire(event)


async def _fold(gateway: Gateway, chat: Chat, wire: rollout_pb2.GenerateRequest) -> Response:
    async with aclosing(_events(gateway, wire)) as events:
        async for event in events:
            chat.take(event)
    return JSONResponse(chat.whole())


async def _stream(gateway: Gateway, chat: Chat, wire: rollout_pb2.GenerateRequest) -> Response:
    """The first event is awaited before the status is sent, so that a refusal is an HTTP error."""
    events = _events(gateway, wire)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            try:
                yield _line(chat.take(first))
                async for event in events:
                    yield _line(chat.take(event))
                options = chat.request.stream_options
                if options is not None and options.include_usage:
                    yield _line(chat.usage_chunk())
            except OmnifleetError as error:
                yield _line(json.loads(bytes(error_response(error).body)))
                return
        yield "data: [DONE]\n\n"

    return _Stream(events, lines())


class _Stream(StreamingResponse):
    """Closes its events however it ends: nobody iterates or closes the lines of a client that left too early."""

    def __init__(self, events: AsyncGenerator[Event, None], lines: AsyncGenerator[str, None]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._lines = events, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all; see starlette."""
        async with aclosing(self._events), aclosing(self._lines):
            await super().__call__(scope, receive, send)


def _line(body: dict[str, Any] | None) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _until_gone(http: Request, answer: Any) -> Response:
    """The answer, or its cancellation as soon as the client hangs up."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_hang_up(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            reply: Response = work.result()
            return reply
        return Response(status_code=499)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _hang_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def read_body(http: Request) -> bytes:
    """The body. Raises LIMIT_EXCEEDED above BODY_BYTES, before it is held in memory."""
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > BODY_BYTES:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the body is larger than {BODY_BYTES} bytes; put pictures into the media service and send media://DIGEST",
            )
        parts.append(part)
    return b"".join(parts)
