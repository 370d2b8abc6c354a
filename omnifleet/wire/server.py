"""One gRPC server, set up the same way everywhere: limits, keepalive, auth, typed errors."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

import omnifleet
from omnifleet.auth import Tokens, allowed
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import common_pb2
from omnifleet.wire.errors import STATUS, TRAILER, to_detail
from omnifleet.wire.handlers import Handler, behaviour_of, remade

log = logging.getLogger("omnifleet.wire")

MESSAGE_BYTES = 16 << 20
"""Largest single message, both directions, both sides. Tensors and media go in chunks of CHUNK_BYTES."""
CHUNK_BYTES = 1 << 20
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
]
INSTANCE = uuid.uuid4().hex[:12]
"""Random per process: tells a restart from a reconnect."""


class _Border(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks the bearer token before a call, and turns exceptions into typed statuses after it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._passing: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return handler
        refusal = self._refusal(details)
        if refusal is not None:
            return _wrap(handler, refusal)
        passing = self._passing.get(method := str(details.method))
        if passing is None:
            passing = self._passing[method] = _wrap(handler, None)
        return passing

    def _refusal(self, details: grpc.HandlerCallDetails) -> OmnifleetError | None:
        if not self._tokens.by_scope:
            return None
        metadata = dict(details.invocation_metadata or ())
        secret = str(metadata.get("authorization", "")).removeprefix("Bearer ")
        scope = self._tokens.scope_of(secret)
        if scope is None:
            return OmnifleetError(
                Reason.UNAUTHENTICATED, "no valid bearer token", knob="OMNIFLEET_TOKENS (tokens file)"
            )
        rule = allowed(str(details.method))
        if scope not in rule:
            wanted = ", ".join(sorted(rule))
            return OmnifleetError(
                Reason.FORBIDDEN, f"{details.method} takes a token of scope {wanted}, not {scope}"
            )
        return None


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    detail = to_detail(error)
    status = STATUS.get(Reason(detail.reason), grpc.StatusCode.INTERNAL)
    if status is grpc.StatusCode.INTERNAL:
        log.error("call failed: %s", detail.message, exc_info=error)
    await context.abort(status, detail.message, ((TRAILER, detail.SerializeToString()),))


def _wrap(handler: Handler, refusal: OmnifleetError | None) -> Handler:
    behaviour = behaviour_of(handler)

    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if refusal is not None:
                raise refusal
            return await behaviour(request, context)
        except (OmnifleetError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
            await _abort(context, error)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            if refusal is not None:
                raise refusal
            replies = behaviour(request, context)
            if inspect.isawaitable(replies):
                replies = await replies
            async with aclosing(replies):
                async for reply in replies:
                    yield reply
        except (OmnifleetError, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
            await _abort(context, error)

    return remade(handler, behaviour=stream if handler.response_streaming else unary)


@asynccontextmanager
async def serving(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    tokens: Tokens,
    knob: str,
    grace_s: float = 5.0,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
) -> AsyncIterator[str]:
    """Run a gRPC server on `listen` ("host:port", port 0 = any); yields the bound "host:port".

    interceptors: of the service itself, inside authentication and typed errors.
    `knob` names the setting of `listen` for the error. Raises OmnifleetError(PORT_TAKEN).
    """
    server = grpc.aio.server(interceptors=[_Border(tokens), *interceptors], options=OPTIONS)
    # Generic handlers only: for registered methods grpc.aio waits for one task a method, and renews these waits at every call.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[attr-defined]
    register(server)
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        message = f"cannot listen on {listen}: address in use or not ours"
        raise OmnifleetError(Reason.PORT_TAKEN, message, knob=knob) from error
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(grace_s)


def handshake(
    request: common_pb2.HandshakeRequest, service: str, features: frozenset[str] = frozenset()
) -> common_pb2.HandshakeReply:
    """Answer a handshake. Raises OmnifleetError(CONTRACT_MISMATCH) for another contract or a missing feature."""
    missing = sorted(set(request.features) - features)
    if request.contract != omnifleet.CONTRACT or missing:
        raise OmnifleetError(
            Reason.CONTRACT_MISMATCH,
            f"{service} speaks {omnifleet.CONTRACT} with features {sorted(features)}; "
            f"{request.client or 'the caller'} asked for {request.contract or 'none'} and {missing or 'nothing more'}",
            knob="install matching omnifleet versions",
        )
    return common_pb2.HandshakeReply(
        contract=omnifleet.CONTRACT,
        service=service,
        version=omnifleet.__version__,
        features=sorted(features),
        instance=INSTANCE,
    )
