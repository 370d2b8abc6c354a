"""The gateway's HTTP door: dialects for environments, the fleet for operators, health and metrics for machines."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request

from omnifleet.auth import Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.http import make_app
from omnifleet_rollout.gateway import openai_chat
from omnifleet_rollout.gateway.gateway import Gateway


def make_gateway_app(gateway: Gateway, tokens: Tokens) -> FastAPI:
    """All routes; everything under /v1 needs a bearer token of any scope."""
    app = make_app("omnifleet gateway", gateway.counters, lambda: gateway.ready)
    guard = [Depends(_bearer(tokens))]
    app.include_router(openai_chat.router(gateway), dependencies=guard)

    @app.get("/v1/fleet", dependencies=guard)
    async def fleet() -> dict[str, Any]:
        return gateway.fleet_json()

    return app


def _bearer(tokens: Tokens) -> Any:
    async def check(request: Request) -> None:
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        if tokens.by_scope and tokens.scope_of(secret) is None:
            raise OmnifleetError(
                Reason.UNAUTHENTICATED,
                "no valid bearer token",
                knob="Authorization: Bearer SECRET (tokens file)",
            )

    return check
