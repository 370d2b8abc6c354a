"""POST /v1/responses: items in, items out, with NeMo Gym's ...ForTraining fields on the last item on request.

A reply is one model turn: reasoning, message and function calls. Nothing is stored under a response id; the conversation
comes as items, and a session keeps its exact tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from omnifleet.client.rollout import Event
from omnifleet.errors import invalid
from omnifleet_rollout.gateway.conversation import Conversation
from omnifleet_rollout.gateway.dialects.fields import ChatFields, Refused
from omnifleet_rollout.gateway.dialects.items import chat_messages, chat_tools
from omnifleet_rollout.gateway.dialects.reply import Choice, Piece, Reply
from omnifleet_rollout.gateway.dialects.serving import Endpoint, endpoint, streamed, whole
from omnifleet_rollout.gateway.dialects.turn import open_turn
from omnifleet_rollout.gateway.gateway import Gateway

PATH = "/v1/responses"
_REFUSED: Refused = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "parallel_tool_calls": (None, True),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "store": (None, False),
    "stream_options": (None, {}),
    "text": (None, {}, {"format": {"type": "text"}}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(ChatFields):
    """The body."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = None

    @property
    def limit(self) -> int | None:
        """Longest reply asked for, tokens."""
        return self.max_output_tokens


class Responses:
    """Makes the whole body and the stream's events of one reply, and has its turn remembered."""

    def __init__(self, gateway: Gateway, request: ResponsesRequest, reply: Reply, turn: Conversation) -> None:
        self._gateway, self._request, self._reply, self._turn = gateway, request, reply, turn
        self._choice = reply.choices[0]
        self._message_id = _id("msg")
        self._earlier: list[dict[str, Any]] = []
        self._sequence = 0

    # ------------------------------------------------------------------ events

    def fold(self, event: Event) -> Piece | None:
        """Take one event in; the sample is remembered before the client hears of its end."""
        piece = self._reply.take(event)
        choice = self._choice
        if piece is not None and choice.parsed is not None and str(choice.finish) != "abort":
            parsed, who = choice.parsed, self._turn.who
            self._gateway.conversations.keep(self._turn, parsed.content, parsed.tool_calls, choice.token_ids)
            if self._request.return_provenance:
                self._earlier = self._gateway.origins.earlier(who)
                versions = self._reply.versions(choice.spans)
                self._gateway.origins.keep(who, self._reply.prompt_tokens, len(choice.token_ids), versions)
        return piece

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        """Like `fold`; the stream's events. Text comes as it is made, or at the end where a parser judges it."""
        piece = self.fold(event)
        if piece is None:
            yield self._event("response.created", response=self._body("in_progress", []))
            yield self._event("response.in_progress", response=self._body("in_progress", []))
            if not self._reply.parses:
                yield from self._open_message()
        elif not self._reply.parses:
            yield self._text_delta(piece)

    def end(self) -> Iterator[dict[str, Any]]:
        """What closes the stream."""
        items = self._items()
        for at, item in enumerate(items):
            open_already = item["type"] == "message" and not self._reply.parses
            yield from () if open_already else self._open(at, item)
            yield from self._close(at, item)
        status = self._status()
        yield self._event(f"response.{status}", response=self._body(status, items))

    def _open_message(self) -> Iterator[dict[str, Any]]:
        yield from self._open(0, _message(self._message_id, "", "in_progress", None))

    def _open(self, at: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        empty = {**item, "status": "in_progress"}
        match item["type"]:
            case "message":
                yield self._event(
                    "response.output_item.added", output_index=at, item={**empty, "content": []}
                )
                part = {"type": "output_text", "text": "", "annotations": []}
                yield self._event("response.content_part.added", **self._at(at, item), part=part)
                if text := item["content"][0]["text"]:
                    yield self._event(
                        "response.output_text.delta", **self._at(at, item), delta=text, logprobs=[]
                    )
            case "reasoning":
                yield self._event(
                    "response.output_item.added", output_index=at, item={**empty, "content": []}
                )
                text = item["content"][0]["text"]
                yield self._event("response.reasoning_text.delta", **self._at(at, item), delta=text)
            case "function_call":
                yield self._event(
                    "response.output_item.added", output_index=at, item={**empty, "arguments": ""}
                )
                where = {"item_id": item["id"], "output_index": at}
                yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])

    def _close(self, at: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match item["type"]:
            case "message":
                part = item["content"][0]
                done = {"text": part["text"], "logprobs": part.get("logprobs") or []}
                yield self._event("response.output_text.done", **self._at(at, item), **done)
                yield self._event("response.content_part.done", **self._at(at, item), part=part)
            case "reasoning":
                text = item["content"][0]["text"]
                yield self._event("response.reasoning_text.done", **self._at(at, item), text=text)
            case "function_call":
                where = {"item_id": item["id"], "output_index": at, "name": item["name"]}
                yield self._event(
                    "response.function_call_arguments.done", **where, arguments=item["arguments"]
                )
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _text_delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.token_ids, piece.logprobs) or []
        where = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        return self._event(
            "response.output_text.delta",
            **where,
            delta=piece.text,
            logprobs=logprobs,
            omnifleet=self._reply.block(piece),
        )

    def _event(self, kind: str, **body: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **body}

    @staticmethod
    def _at(at: int, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": at, "content_index": 0}

    # ------------------------------------------------------------------ bodies

    def whole(self) -> dict[str, Any]:
        """The body after the last event."""
        return self._body(self._status(), self._items())

    def _status(self) -> str:
        return "completed" if str(self._choice.finish) == "stop" else "incomplete"

    def _items(self) -> list[dict[str, Any]]:
        """Only what the model said: reasoning, message, calls; training fields on the last."""
        choice, parsed = self._choice, self._choice.parsed
        assert parsed is not None, "the sample has ended"
        status, items = self._status(), []
        if parsed.reasoning:
            content = [{"type": "reasoning_text", "text": parsed.reasoning}]
            items.append({"id": _id("rs"), "type": "reasoning", "summary": [], "content": content})
        if parsed.content or not parsed.tool_calls:
            logprobs = self._logprobs(choice.token_ids, choice.logprobs)
            items.append(_message(self._message_id, parsed.content, status, logprobs))
        for call in parsed.tool_calls:
            function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            items.append({"id": _id("fc"), "type": "function_call", **function, "status": status})
        items[-1] |= self._reply.training(choice)
        return items

    def _body(self, status: str, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        request, reply = self._request, self._reply
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": _cut(self._choice) if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": reply.sampling.max_tokens,
            "metadata": (request.model_extra or {}).get("metadata") or {},
            "model": reply.model,
            "output": list(items),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": reply.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": reply.sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if status != "in_progress" else None,
            "omnifleet": self._origin(),
        }

    def _origin(self) -> dict[str, Any]:
        versions = {"weight_versions": self._reply.versions(self._choice.spans)}
        earlier = {"earlier": self._earlier} if self._earlier else {}
        return {**self._reply.origin(), **versions, **earlier}

    def _usage(self) -> dict[str, Any]:
        reply = self._reply
        return {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.made_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.made_tokens,
        }

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]] | None:
        if _LOGPROBS not in (self._request.include or ()):
            return None
        texts = [self._reply.renderer.token_text(id) for id in ids]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]


def _message(id: str, text: str, status: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    if logprobs is not None:
        part["logprobs"] = logprobs
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _cut(choice: Choice) -> dict[str, str]:
    return {"reason": "max_output_tokens" if str(choice.finish) == "length" else "aborted"}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def serve(gateway: Gateway) -> Endpoint:
    """What serves PATH."""
    return endpoint(ResponsesRequest, _REFUSED, partial(_answer, gateway))


async def _answer(gateway: Gateway, http: Request, request: ResponsesRequest) -> Response:
    if extra := sorted(set(request.include or ()) - {_LOGPROBS}):
        raise invalid(f"include {', '.join(extra)} cannot be honoured here; allowed is {_LOGPROBS}")
    messages = chat_messages(request.input, request.instructions)
    opened = await open_turn(gateway, http, request, "resp", messages, chat_tools(request.tools))
    answer = Responses(gateway, request, opened.reply, opened.turn)
    if request.stream:
        return await streamed(opened.events, answer.take, answer.end, named=True)
    return await whole(opened.events, answer.fold, answer.whole)
