"""The gateway's HTTP door: dialects for environments, the fleet for operators, health and metrics for machines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omnifleet.auth import Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.http import make_app
from omnifleet.types import Identity
from omnifleet_rollout.gateway.dialects import chat, completions, responses
from omnifleet_rollout.gateway.dialects.serving import Endpoint
from omnifleet_rollout.gateway.gateway import Gateway
from omnifleet_rollout.gateway.session_key import PREFIX, SessionKeys

Check = Callable[[Request], Awaitable[None]]
"""Raises UNAUTHENTICATED; notes who a session key proves the client to be."""


def make_gateway_app(gateway: Gateway, tokens: Tokens) -> FastAPI:
    """All routes; everything under /v1 needs a bearer token of any scope."""
    app = make_app("omnifleet gateway", gateway.counters, lambda: gateway.ready)
    check = _bearer(tokens, gateway.session_keys)
    guard = [Depends(check)]
    # Plain routes, before all others: they have no parameters for FastAPI to solve, a fifth of the calls of a short reply.
    app.router.routes[:0] = [
        Route(dialect.PATH, _guarded(check, dialect.serve(gateway)), methods=["POST"])
        for dialect in (chat, completions, responses)
    ]

    @app.get("/v1/models", dependencies=guard)
    async def models() -> dict[str, Any]:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "omnifleet"}
            for name in gateway.models()
        ]
        return {"object": "list", "data": data}

    @app.post("/v1/sessions", dependencies=guard)
    async def sessions(ask: SessionAsk, http: Request) -> dict[str, Any]:
        if getattr(http.state, "proven", None) is not None:
            raise OmnifleetError(Reason.FORBIDDEN, "a session key mints no session keys")
        return _mint(gateway, ask)

    @app.get("/v1/fleet", dependencies=guard)
    async def fleet() -> dict[str, Any]:
        return gateway.fleet_json()

    return app


class SessionAsk(BaseModel):
    """Who a session key is for. session: a name of its own, made up if empty. ttl_s: seconds that the key is good for."""

    model_config = ConfigDict(extra="forbid")

    run: str = "default"
    environment: str = ""
    episode: str = ""
    session: str = ""
    ttl_s: float = Field(86_400, gt=0, le=30 * 86_400)


def _mint(gateway: Gateway, ask: SessionAsk) -> dict[str, Any]:
    who = Identity(ask.run, ask.environment, ask.session or uuid.uuid4().hex, ask.episode)
    expires = time.time() + ask.ttl_s
    return {
        "key": gateway.session_keys.mint(who, expires),
        "run": who.run,
        "environment": who.environment,
        "episode": who.episode,
        "session": who.session,
        "expires_unix": int(expires),
    }


def _guarded(check: Check, serve: Endpoint) -> Endpoint:
    async def guarded(http: Request) -> Response:
        await check(http)
        return await serve(http)

    return guarded


def _bearer(tokens: Tokens, keys: SessionKeys) -> Check:
    async def check(request: Request) -> None:
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = next(
            (text for text in (secret, request.headers.get("x-omnifleet-session", "")) if _is_key(text)), ""
        )
        if key:
            request.state.proven = keys.read(key)
        if tokens.by_scope and tokens.scope_of(secret) is None and key != secret:
            raise OmnifleetError(
                Reason.UNAUTHENTICATED,
                "no valid bearer token",
                knob="Authorization: Bearer SECRET (tokens file) or a session key",
            )

    return check


def _is_key(text: str) -> bool:
    return text.startswith(PREFIX)
