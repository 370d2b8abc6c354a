"""POST /v1/chat/completions: streaming and not, tools and reasoning, exact tokens and versions on request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from omnifleet.client.rollout import Event
from omnifleet_rollout.gateway.conversation import Conversation
from omnifleet_rollout.gateway.dialects.fields import ChatFields, Refused, StreamOptions
from omnifleet_rollout.gateway.dialects.reply import Choice, Piece, Reply
from omnifleet_rollout.gateway.dialects.serving import Endpoint, endpoint, streamed, whole
from omnifleet_rollout.gateway.dialects.turn import open_turn
from omnifleet_rollout.gateway.gateway import Gateway

PATH = "/v1/chat/completions"
_REFUSED: Refused = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "include_reasoning": (None, True),
    "parallel_tool_calls": (None, True),
    "store": (None, False),
}


class ChatRequest(ChatFields):
    """The body."""

    messages: list[Any]
    n: int | None = Field(1, ge=1)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    return_tokens_as_token_ids: bool = False

    @property
    def samples(self) -> int:
        """Replies asked for."""
        return self.n or 1

    @property
    def limit(self) -> int | None:
        """Longest reply asked for, tokens."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Chat:
    """Makes whole bodies and chunks of one reply, and has its turns remembered."""

    def __init__(self, gateway: Gateway, request: ChatRequest, reply: Reply, turn: Conversation) -> None:
        self._gateway, self._request, self._reply, self._turn = gateway, request, reply, turn

    def fold(self, event: Event) -> Piece | None:
        """Take one event in; a sample that has ended is remembered before the client hears of it."""
        piece = self._reply.take(event)
        if piece is not None and piece.last:
            self._keep(piece.choice)
        return piece

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        """Like `fold`; the chunks that a stream sends for the event."""
        piece = self.fold(event)
        if piece is None:
            roles = [
                {"index": c.index, "delta": {"role": "assistant"}, "finish_reason": None}
                for c in self._reply.choices
            ]
            yield {**self._head("chat.completion.chunk"), "choices": roles, "omnifleet": self._reply.origin()}
            return
        yield self._chunk(piece)

    def end(self) -> Iterator[dict[str, Any]]:
        """The chunk after the last, if usage was asked for."""
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._reply.usage()}

    def whole(self) -> dict[str, Any]:
        """The body after the last event."""
        choices = [
            {
                "index": choice.index,
                "message": {**self._message(choice), **self._reply.training(choice)},
                "finish_reason": _finish(choice),
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "omnifleet": {"weight_versions": self._reply.versions(choice.spans)},
            }
            for choice in self._reply.choices
        ]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": self._reply.usage(), "omnifleet": self._reply.origin()}

    def _keep(self, choice: Choice) -> None:
        if choice.parsed is not None and str(choice.finish) != "abort":
            parsed = choice.parsed
            self._gateway.conversations.keep(self._turn, parsed.content, parsed.tool_calls, choice.token_ids)

    def _message(self, choice: Choice) -> dict[str, Any]:
        assert choice.parsed is not None, "the sample has ended"
        parsed = choice.parsed
        body: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content or (None if parsed.tool_calls else ""),
            "refusal": None,
        }
        if parsed.reasoning:
            body["reasoning_content"] = parsed.reasoning
        if calls := _calls(choice):
            body["tool_calls"] = calls
        return body

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        body = {
            "index": piece.choice.index,
            "delta": self._delta(piece),
            "finish_reason": _finish(piece.choice) if piece.last else None,
            "logprobs": self._logprobs(piece.token_ids, piece.logprobs),
            "omnifleet": self._reply.block(piece),
        }
        return {**self._head("chat.completion.chunk"), "choices": [body]}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not (piece.last and self._reply.parses):
            return {"content": piece.text} if piece.text or not piece.last else {}
        message = self._message(piece.choice)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        said = {name: message[name] for name in ("reasoning_content", "content") if message.get(name)}
        return {**said, **({"tool_calls": calls} if calls else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        reply = self._reply
        return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = []
        for id, logprob in zip(ids, logprobs, strict=True):
            text = self._reply.renderer.token_text(id)
            token = f"token_id:{id}" if self._request.return_tokens_as_token_ids else text
            content.append(
                {"token": token, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in (choice.parsed.tool_calls if choice.parsed else ())
    ]


def _finish(choice: Choice) -> str:
    called = choice.parsed is not None and choice.parsed.tool_calls
    return "tool_calls" if called and str(choice.finish) == "stop" else str(choice.finish)


def serve(gateway: Gateway) -> Endpoint:
    """What serves PATH."""
    return endpoint(ChatRequest, _REFUSED, partial(_answer, gateway))


async def _answer(gateway: Gateway, http: Request, request: ChatRequest) -> Response:
    opened = await open_turn(gateway, http, request, "chatcmpl", request.messages, request.tools)
    chat = Chat(gateway, request, opened.reply, opened.turn)
    if request.stream:
        return await streamed(opened.events, chat.take, chat.end)
    return await whole(opened.events, chat.fold, chat.whole)
