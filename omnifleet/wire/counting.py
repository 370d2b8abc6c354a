"""Counts the bytes of messages where they are serialised anyway, on either side of a wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from omnifleet.wire.handlers import Handler, remade

_ToBytes: TypeAlias = Callable[[Any], bytes]
_FromBytes: TypeAlias = Callable[[bytes], Any]


class Meter(Protocol):
    """Who is told; `omnifleet.telemetry.payload.PayloadMeter` is one."""

    def serialized(self, boundary: str, size: int) -> None:
        """One message of `size` bytes crossed `boundary`."""


def boundary_of(method: str) -> str:
    """`/omnifleet.v1alpha.Media/Put` is `media_put`."""
    service, _, name = method.rpartition("/")
    return f"{service.rpartition('.')[2]}_{name}".lower()


class CountMessages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Tells a meter about every message that a server takes or gives."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, with its serialisers watched."""
        handler = await continuation(details)
        if handler is None:
            return handler
        boundary = boundary_of(str(details.method))
        return remade(
            handler,
            deserialize=_counted_in(handler.request_deserializer, self._meter, boundary),
            serialize=_counted_out(handler.response_serializer, self._meter, boundary),
        )


class CountingChannel:
    """A channel for a generated stub that tells a meter about every message."""

    def __init__(self, channel: grpc.aio.Channel, meter: Meter) -> None:
        self._meter = meter
        self.unary_unary = self._counted(channel.unary_unary)
        self.unary_stream = self._counted(channel.unary_stream)
        self.stream_unary = self._counted(channel.stream_unary)
        self.stream_stream = self._counted(channel.stream_stream)

    def _counted(self, open_call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(
            method: str,
            request_serializer: _ToBytes | None = None,
            response_deserializer: _FromBytes | None = None,
            **options: Any,
        ) -> Any:
            boundary = boundary_of(method)
            return open_call(
                method,
                request_serializer=_counted_out(request_serializer, self._meter, boundary),
                response_deserializer=_counted_in(response_deserializer, self._meter, boundary),
                **options,
            )

        return watched


def _counted_out(to_bytes: _ToBytes | None, meter: Meter, boundary: str) -> _ToBytes:
    def give(message: Any) -> bytes:
        data = to_bytes(message) if to_bytes else message
        meter.serialized(boundary, len(data))
        return data

    return give


def _counted_in(from_bytes: _FromBytes | None, meter: Meter, boundary: str) -> _FromBytes:
    def take(data: bytes) -> Any:
        meter.serialized(boundary, len(data))
        return from_bytes(data) if from_bytes else data

    return take
