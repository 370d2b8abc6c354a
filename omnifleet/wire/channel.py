"""One gRPC channel, set up the same way everywhere: limits, keepalive, bearer token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from omnifleet.wire.server import OPTIONS


class _Bearer:
    """Adds the token to each call."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def _details(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._secret}")
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        return await continuation(self._details(details), request)

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        return await continuation(self._details(details), request)

    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], details: Any, requests: Any
    ) -> Any:
        return await continuation(self._details(details), requests)

    async def intercept_stream_stream(
        self, continuation: Callable[..., Any], details: Any, requests: Any
    ) -> Any:
        return await continuation(self._details(details), requests)


def open_channel(address: str, secret: str = "") -> grpc.aio.Channel:
    """An asyncio channel to "host:port"; `secret` is the bearer token, "" for none. Close it when done."""
    interceptors = []
    if secret:
        bearer = _Bearer(secret)
        # grpc.aio files an interceptor under the first kind it matches, so each kind needs its own view of it.
        interceptors = [_only(bearer, kind) for kind in _KINDS]
    return grpc.aio.insecure_channel(address, options=OPTIONS, interceptors=interceptors)


_KINDS = (
    (grpc.aio.UnaryUnaryClientInterceptor, "intercept_unary_unary"),
    (grpc.aio.UnaryStreamClientInterceptor, "intercept_unary_stream"),
    (grpc.aio.StreamUnaryClientInterceptor, "intercept_stream_unary"),
    (grpc.aio.StreamStreamClientInterceptor, "intercept_stream_stream"),
)


def _only(bearer: _Bearer, kind: tuple[type, str]) -> grpc.aio.ClientInterceptor:
    base, method = kind
    view: grpc.aio.ClientInterceptor = type(base.__name__, (base,), {method: getattr(bearer, method)})()
    return view
