"""Around every HTTP answer: bytes counted as they pass, and headers that keep stored content from acting."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnifleet.telemetry.payload import PayloadMeter

_POLICY = "default-src 'none'; img-src 'self'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
_WRITES = frozenset({"POST", "PUT"})
_MEDIA = "/v1/"


class HttpWatch:
    """ASGI middleware. Bodies of /v1/ count as serialized bytes of `http_put` and `http_get`."""

    def __init__(self, app: ASGIApp, payload: PayloadMeter) -> None:
        self._app, self._payload = app, payload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        boundary = "http_put" if scope["method"] in _WRITES else "http_get"
        counted = scope["path"].startswith(_MEDIA)

        def count(message: Message) -> None:
            if counted and message.get("body"):
                self._payload.serialized(boundary, len(message["body"]))

        async def taking() -> Message:
            message = await receive()
            count(message)
            return message

        async def giving(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
            count(message)
            await send(message)

        await self._app(scope, taking, giving)
