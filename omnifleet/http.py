"""One HTTP server, set up the same way everywhere: bound before it is announced, health and metrics, typed errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

import omnifleet
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.wire.errors import HTTP_STATUS

_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx: 5 s): else both may let go at once, and a request is lost on the way."""


def make_app(title: str, counters: Counters, ready: Callable[[], bool], *, docs: bool = True) -> FastAPI:
    """A FastAPI app with /healthz (process lives), /readyz (can serve), /metrics, and OmnifleetError as JSON.

    docs: serve FastAPI's own pages about the routes, which load scripts from elsewhere and ask for no token.
    """
    app = FastAPI(title=title, version=omnifleet.__version__, openapi_url="/openapi.json" if docs else None)

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readiness() -> JSONResponse:
        return JSONResponse({"ready": ready()}, status_code=200 if ready() else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(counters.exposition(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(OmnifleetError)
    async def typed(_: Request, error: OmnifleetError) -> JSONResponse:
        return error_response(error)

    return app


def error_response(error: OmnifleetError) -> JSONResponse:
    """The OpenAI error shape plus reason, retryable and knob; Retry-After in whole seconds, rounded up."""
    body = {
        "error": {
            "message": error.message,
            "type": str(error.reason),
            "code": str(error.reason),
            "retryable": error.retryable,
            "knob": error.knob,
            "current_version": str(error.current_version) if error.current_version else None,
        }
    }
    headers = {"Retry-After": str(-(-error.retry_after_ms // 1000))} if error.retry_after_ms else {}
    return JSONResponse(body, status_code=HTTP_STATUS.get(error.reason, 503), headers=headers)


@asynccontextmanager
async def http_serving(app: FastAPI, listen: str, *, knob: str) -> AsyncIterator[str]:
    """Run `app` on `listen` ("host:port", port 0 = any); yields the bound "host:port". Raises PORT_TAKEN."""
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio switches Nagle's algorithm off only then, and it costs 40 ms a reply.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), int(port)))
        sock.listen(2048)  # from here on a connection waits instead of being refused while the server starts
    except OSError as error:
        sock.close()
        raise OmnifleetError(
            Reason.PORT_TAKEN, f"cannot listen on {listen}: {error.strerror}", knob=knob
        ) from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([sock]))
    try:
        yield f"{host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        sock.close()
