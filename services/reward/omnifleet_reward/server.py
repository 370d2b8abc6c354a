"""The service on the wire: gRPC for services, HTTP for people and scripts."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from fastapi import FastAPI, Request
from pydantic import Field, ValidationError

import omnifleet
from omnifleet.auth import Tokens
from omnifleet.config.base import StrictModel, config_error
from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.http import http_serving, make_app
from omnifleet.service import load_section, load_tokens, until_stopped, write_record
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet.wire import common_pb2, reward_pb2, reward_pb2_grpc
from omnifleet.wire.codec import counters_to_wire
from omnifleet.wire.errors import to_detail
from omnifleet.wire.server import INSTANCE, MESSAGE_BYTES, handshake, serving
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.scorer import Reply
from omnifleet_reward.service import RewardService, Scored

log = logging.getLogger("omnifleet.reward")
_MARKS = {
    Mark.SCORED: reward_pb2.MARK_SCORED,
    Mark.UNPARSEABLE: reward_pb2.MARK_UNPARSEABLE,
    Mark.TIMEOUT: reward_pb2.MARK_TIMEOUT,
    Mark.CRASHED: reward_pb2.MARK_CRASHED,
}
Model = TypeVar("Model", bound=StrictModel)


async def serve(
    run_dir: Path,
    *,
    listen: str = "",
    http_listen: str = "",
    overrides: tuple[str, ...] = (),
    tokens_file: Path | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. Raises OmnifleetError for bad settings or a taken port."""
    config = load_section(run_dir, "reward_service", RewardConfig, overrides)
    tokens = load_tokens(run_dir, tokens_file)
    counters = Counters("reward")
    async with reward_service(config, counters, run_dir=run_dir) as service:
        app = make_http(service, counters, tokens)
        rpc = RewardRpc(service, counters)
        async with (
            serving(
                listen or config.listen, rpc.register, tokens=tokens, knob="reward_service.listen"
            ) as grpc_at,
            http_serving(
                app, http_listen or config.http_listen, knob="reward_service.http_listen"
            ) as http_at,
        ):
            write_record(run_dir, "reward", grpc=grpc_at, http=http_at)
            log.info(
                "serving gRPC on %s, HTTP on %s, %d scorer processes", grpc_at, http_at, config.processes
            )
            await until_stopped()
            log.info("stopping")


class RewardRpc(reward_pb2_grpc.RewardServicer):
    """proto Reward."""

    def __init__(self, service: RewardService, counters: Counters) -> None:
        self._service = service
        self._counters = counters
        self._started = time.monotonic()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        reward_pb2_grpc.add_RewardServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """Compare contracts."""
        return handshake(request, "reward")

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreReply:
        """Score a batch; one bad item never fails the others."""
        replies = [_reply(item) for item in request.items]
        configs = [_config(spec) for spec in request.scorers]
        scored, version = await self._service.score(configs, replies, request.item_timeout_ms / 1000)
        pairs = zip(request.items, scored, strict=True)
        return reward_pb2.ScoreReply(scores=[_item(i.id, s) for i, s in pairs], reward_version=version)

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: Any
    ) -> reward_pb2.ListScorersReply:
        """All scorers with the schema of their parameters."""
        return reward_pb2.ListScorersReply(
            scorers=[
                reward_pb2.ScorerInfo(
                    name=scorer.name,
                    version=scorer.version,
                    doc=scorer.doc,
                    params_schema_json=json.dumps(scorer.params.model_json_schema()),
                )
                for scorer in self._service.scorers()
            ]
        )

    async def ReachableMaximum(
        self, request: reward_pb2.ReachableMaximumRequest, context: Any
    ) -> reward_pb2.ReachableMaximumReply:
        """The best total in the prompt's template."""
        configs = [_config(spec) for spec in request.scorers]
        found = await self._service.reachable(configs, request.prompt_suffix)
        return reward_pb2.ReachableMaximumReply(
            maximum=found.maximum, example=found.example, reward_version=found.reward_version
        )

    async def Status(self, request: common_pb2.StatusRequest, context: Any) -> common_pb2.ServiceStatus:
        """Counters and state."""
        return common_pb2.ServiceStatus(
            service="reward",
            version=omnifleet.__version__,
            instance=INSTANCE,
            uptime_s=time.monotonic() - self._started,
            state="serving" if self._service.ready else "starting",
            counters=counters_to_wire(self._counters.snapshot()),
            facts={"scorers": ", ".join(scorer.label for scorer in self._service.scorers())},
        )


def _reply(item: reward_pb2.ScoreItem) -> Reply:
    return Reply(
        response=item.response,
        ground_truth=item.ground_truth,
        prompt=item.prompt,
        media=tuple(ref.digest for ref in item.media),
        extra=_mapping(item.extra_json, f"items[{item.id}].extra_json"),
        prompt_suffix=item.prompt_suffix,
    )


def _config(spec: reward_pb2.ScorerSpec) -> ScorerConfig:
    body = {
        "name": spec.name,
        "version": spec.version,
        "weight": spec.weight,
        "params": _mapping(spec.params_json, f"scorers[{spec.name}].params_json"),
    }
    return _checked(ScorerConfig, body, "scorers")


def _mapping(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise invalid(f"{field} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"{field} is a JSON object, not {type(value).__name__}")
    return value


def _item(item_id: str, scored: Scored) -> reward_pb2.ItemScore:
    total = scored.total
    if scored.error is not None:
        return reward_pb2.ItemScore(id=item_id, error=to_detail(scored.error), mark=_MARKS[total.mark])
    components = [
        reward_pb2.ComponentScore(
            scorer=label, score=verdict.score, correct=verdict.correct, mark=_MARKS[verdict.mark]
        )
        for label, verdict in scored.components
    ]
    return reward_pb2.ItemScore(
        id=item_id,
        score=total.score,
        correct=total.correct,
        components=components,
        mark=_MARKS[total.mark],
    )


class HttpItem(StrictModel):
    """One item of POST /v1/score."""

    id: str = ""
    response: str
    ground_truth: str
    prompt: str = ""
    media: tuple[str, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)
    prompt_suffix: str = ""


class HttpScore(StrictModel):
    """Body of POST /v1/score."""

    scorers: tuple[ScorerConfig, ...]
    items: tuple[HttpItem, ...]
    item_timeout_ms: int = Field(0, ge=0)


def make_http(service: RewardService, counters: Counters, tokens: Tokens) -> FastAPI:
    """/healthz, /readyz, /metrics, and with a bearer token POST /v1/score and GET /v1/scorers."""
    app = make_app("omnifleet reward", counters, lambda: service.ready)

    @app.post("/v1/score")
    async def score(request: Request) -> dict[str, Any]:
        _authenticate(request, tokens)
        body = _checked(HttpScore, await _json_body(request), "body")
        replies = [
            Reply(item.response, item.ground_truth, item.prompt, item.media, item.extra, item.prompt_suffix)
            for item in body.items
        ]
        scored, version = await service.score(body.scorers, replies, body.item_timeout_ms / 1000)
        scores = [_http_item(item.id, result) for item, result in zip(body.items, scored, strict=True)]
        return {"reward_version": version, "scores": scores}

    @app.get("/v1/scorers")
    async def scorers(request: Request) -> dict[str, Any]:
        _authenticate(request, tokens)
        return {
            "scorers": [
                {"name": s.name, "version": s.version, "doc": s.doc, "params": s.params.model_json_schema()}
                for s in service.scorers()
            ]
        }

    return app


def _http_item(item_id: str, scored: Scored) -> dict[str, Any]:
    if scored.error is not None:
        error = scored.error
        told = {
            "reason": error.reason,
            "message": error.message,
            "retryable": error.retryable,
            "knob": error.knob,
        }
        return {"id": item_id, "score": None, "mark": scored.total.mark, "error": told}
    components = {
        label: {"score": v.score, "correct": v.correct, "mark": v.mark} for label, v in scored.components
    }
    return {
        "id": item_id,
        "score": scored.total.score,
        "correct": scored.total.correct,
        "mark": scored.total.mark,
        "components": components,
    }


def _authenticate(request: Request, tokens: Tokens) -> None:
    secret = request.headers.get("authorization", "").removeprefix("Bearer ")
    if tokens.by_scope and tokens.scope_of(secret) is None:
        raise OmnifleetError(Reason.UNAUTHENTICATED, "no valid bearer token", knob="Authorization header")


async def _json_body(request: Request) -> Any:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MESSAGE_BYTES:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED, f"body over {MESSAGE_BYTES} bytes: send smaller batches"
            )
    try:
        return json.loads(body)
    except ValueError as error:
        raise invalid(f"body is not JSON: {error}") from None


def _checked(model: type[Model], body: Any, source: str) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid(config_error(error, model, source).message) from None
