"""A method's handler with something put around it: what interceptors that change calls or messages have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behaviour_of(handler: Handler) -> Any:
    """The function that answers calls, whichever of the four kinds it is."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def remade(
    handler: Handler,
    *,
    behaviour: Any = None,
    deserialize: Callable[[bytes], Any] | None = None,
    serialize: Callable[[Any], bytes] | None = None,
) -> Handler:
    """A handler of the same kind; what is not given stays as it was."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(bool(handler.request_streaming), bool(handler.response_streaming))]
    made: Handler = make(
        behaviour or behaviour_of(handler),
        request_deserializer=deserialize or handler.request_deserializer,
        response_serializer=serialize or handler.response_serializer,
    )
    return made
