"""HTTP around a dialect: bodies within a limit, refusals before the status line, streams that end when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from omnifleet.client.rollout import Event
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.http import error_response
from omnifleet_rollout.gateway.dialects.fields import Body, Refused, parse

BODY_BYTES = 96 << 20
"""Largest body: pictures may come inline."""

Events = AsyncGenerator[Event, None]
Item = TypeVar("Item")
Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint(
    kind: type[Body], refused: Refused, answer: Callable[[Request, Body], Coroutine[Any, Any, Response]]
) -> Endpoint:
    """What serves a dialect's path: the body as `kind`, and the answer to it for as long as the client is there."""

    async def serve(http: Request) -> Response:
        request, unknown = parse(await read_body(http), kind, refused)
        return warned(await until_gone(http, answer(http, request)), unknown)

    return serve


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


async def whole(
    events: AsyncGenerator[Item, None], fold: Callable[[Item], Any], body: Callable[[], Any]
) -> Response:
    """Fold all events, then answer with `body()`."""
    async with aclosing(events):
        async for event in events:
            fold(event)
    return JSONResponse(body())


async def until_gone(http: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or its cancellation as soon as the client hangs up."""
    try:
        async with asyncio.timeout(None) as patience:
            watch = asyncio.ensure_future(_hang_up(http, patience))
            try:
                return await answer
            finally:
                watch.cancel()
    except TimeoutError:
        if not patience.expired():
            raise
        return Response(status_code=499)


async def streamed(
    events: AsyncGenerator[Item, None],
    take: Callable[[Item], Iterable[dict[str, Any]]],
    end: Callable[[], Iterable[dict[str, Any]]],
    *,
    named: bool = False,
) -> Response:
    """Server-sent events: what `take` makes of each event, then `end()`. named: each line block names its type.

    The first event is awaited before the status is sent, so that a refusal is an HTTP error.
    """
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    line = _named_line if named else _line

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            try:
                for body in take(first):
                    yield line(body)
                async for event in events:
                    for body in take(event):
                        yield line(body)
                for body in end():
                    yield line(body)
            except OmnifleetError as error:
                yield _line(json.loads(bytes(error_response(error).body)))
                return
        if not named:
            yield "data: [DONE]\n\n"

    return Stream(events, lines())


class Stream(StreamingResponse):
    """Closes its events however it ends: nobody iterates or closes the lines of a client that left too early."""

    def __init__(self, events: AsyncGenerator[Any, None], lines: AsyncGenerator[str, None]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._lines = events, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all; see starlette."""
        async with aclosing(self._events), aclosing(self._lines):
            await super().__call__(scope, receive, send)


def warned(reply: Response, unknown: list[str]) -> Response:
    """The reply, with a header that names the fields that were ignored."""
    if unknown:
        names = ", ".join(ascii(name)[1:-1] for name in unknown)[:1000]
        reply.headers["x-omnifleet-warning"] = f"unknown fields were ignored: {names}"
    return reply


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _named_line(body: dict[str, Any]) -> str:
    return f"event: {body['type']}\n{_line(body)}"


async def _hang_up(http: Request, patience: asyncio.Timeout) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    patience.reschedule(0.0)  # long ago
