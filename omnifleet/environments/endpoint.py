"""An OpenAI address of one episode, for agents that ask a model themselves: they get a base URL, nothing else.

What they ask goes to the gateway under the episode's own terms and becomes a turn of its session. One server a process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from omnifleet.environments.session import Session
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.http import error_response, http_serving

_BODY_BYTES = 96 << 20


@dataclass(slots=True)
class _Seat:
    """One episode. Its turns follow one another, however many requests come at once."""

    session: Session
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failure: OmnifleetError | None = None


class Endpoint:
    """The server of one environment in one process; it is up while an episode has a seat."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._stack = AsyncExitStack()
        self._address = ""
        self._moving = asyncio.Lock()

    @asynccontextmanager
    async def seat(self, session: Session) -> AsyncIterator[str]:
        """The base URL (with /v1) of one episode, good until the end of the block; any API key will do.

        A block that raises after the gateway refused ends with that refusal: no fault of the agent.
        """
        key, seat = secrets.token_urlsafe(24), _Seat(session)
        async with self._moving:
            if not self._seats:
                serving = http_serving(self._app(), "127.0.0.1:0", knob="environments")
                self._address = await self._stack.enter_async_context(serving)
            self._seats[key] = seat
        try:
            yield f"http://{self._address}/{key}/v1"
        except Exception as error:
            if seat.failure is not None:
                raise seat.failure from error
            raise
        finally:
            async with self._moving:
                del self._seats[key]
                if not self._seats:
                    await self._stack.aclose()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.post("/{key}/v1/chat/completions")
        async def chat(key: str, http: Request) -> Response:
            try:
                body = await _body(http)
                reply = await self._chat(key, body)
            except OmnifleetError as error:
                return error_response(error)
            if body.get("stream"):
                return StreamingResponse(_stream(reply), media_type="text/event-stream")
            return JSONResponse(reply)

        return app

    async def _chat(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        seat = self._seats.get(key)
        if seat is None:
            raise OmnifleetError(Reason.UNAUTHENTICATED, "no episode has this address")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        tools, template = body.get("tools") or (), body.get("chat_template_kwargs") or {}
        async with seat.turn:
            try:
                message, turn = await seat.session.say(body["messages"], tools, limit, template)
            except OmnifleetError as error:
                seat.failure = error
                raise
        finish = "tool_calls" if message.get("tool_calls") else str(turn.finish_reason)
        usage = {"prompt_tokens": len(turn.prompt_token_ids), "completion_tokens": len(turn.token_ids)}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model") or "policy"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }


async def _stream(reply: Mapping[str, Any]) -> AsyncIterator[str]:
    """The whole reply as one chunk, then the usage."""
    (choice,) = reply["choices"]
    calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    kept = {name: reply[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    said = {"index": 0, "delta": delta, "finish_reason": choice["finish_reason"], "logprobs": None}
    for chunk in ({**kept, "choices": [said]}, {**kept, "choices": [], "usage": reply["usage"]}):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


async def _body(http: Request) -> dict[str, Any]:
    if int(http.headers.get("content-length") or 0) > _BODY_BYTES:
        raise invalid(f"the body is larger than {_BODY_BYTES} bytes", reason=Reason.LIMIT_EXCEEDED)
    try:
        body = json.loads(await http.body())
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
        raise invalid("messages is missing")
    if (body.get("n") or 1) != 1:
        raise invalid("an episode has one reply at a time: leave out n")
    if body.get("tool_choice") not in (None, "auto"):
        raise invalid(
            "tool_choice is auto here: to force a call would change what the tokens are sampled from"
        )
    return dict(body)
