"""Errors on the wire: `OmnifleetError` <-> gRPC status plus an `ErrorDetail` trailer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import common_pb2
from omnifleet.wire.codec import version_from_wire, version_to_wire

TRAILER = "omnifleet-error-bin"

STATUS: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_MEDIA: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.HISTORY_CHANGED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.MEDIA_LOST: grpc.StatusCode.NOT_FOUND,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.CONTRACT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.VERSION_TOO_OLD: grpc.StatusCode.UNAVAILABLE,
    Reason.VERSION_MOVED: grpc.StatusCode.ABORTED,
    Reason.LOGPROBS_MODE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.REFIT_REJECTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_ROOM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.FENCED: grpc.StatusCode.UNAVAILABLE,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_ERROR: grpc.StatusCode.INTERNAL,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.PORT_TAKEN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_MISSING: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Reason.CONFLICT: grpc.StatusCode.ABORTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

HTTP_STATUS: dict[Reason, int] = {
    Reason.INVALID_CONFIG: 400,
    Reason.INVALID_REQUEST: 400,
    Reason.INVALID_MEDIA: 400,
    Reason.PROMPT_TOO_LONG: 400,
    Reason.HISTORY_CHANGED: 400,
    Reason.LIMIT_EXCEEDED: 413,
    Reason.NOT_FOUND: 404,
    Reason.MEDIA_LOST: 404,
    Reason.UNAUTHENTICATED: 401,
    Reason.FORBIDDEN: 403,
    Reason.CONTRACT_MISMATCH: 409,
    Reason.VERSION_TOO_OLD: 503,
    Reason.VERSION_MOVED: 409,
    Reason.LOGPROBS_MODE: 409,
    Reason.REFIT_REJECTED: 409,
    Reason.OVERLOADED: 429,
    Reason.DEADLINE: 504,
    Reason.DISK_FULL: 507,
    Reason.CONFLICT: 409,
    Reason.UNSUPPORTED: 501,
    Reason.INTERNAL: 500,
    Reason.ENGINE_ERROR: 500,
}
"""Reasons that are not listed answer 503."""


def to_detail(error: BaseException) -> common_pb2.ErrorDetail:
    """Any exception as a detail message; unknown ones become INTERNAL with their type's name."""
    if not isinstance(error, OmnifleetError):
        return common_pb2.ErrorDetail(reason=Reason.INTERNAL, message=f"{type(error).__name__}: {error}")
    return common_pb2.ErrorDetail(
        reason=error.reason,
        message=error.message,
        retryable=error.retryable,
        knob=error.knob,
        retry_after_ms=error.retry_after_ms,
        current_version=version_to_wire(error.current_version),
    )


def from_detail(detail: common_pb2.ErrorDetail) -> OmnifleetError:
    """A detail message as an exception; a reason this build does not know becomes INTERNAL."""
    known = detail.reason in Reason.__members__.values()
    version = version_from_wire(detail.current_version) if detail.HasField("current_version") else None
    return OmnifleetError(
        Reason(detail.reason) if known else Reason.INTERNAL,
        detail.message if known else f"{detail.reason}: {detail.message}",
        retryable=detail.retryable,
        knob=detail.knob,
        retry_after_ms=detail.retry_after_ms,
        current_version=version,
    )


_CUT_OFF = ("Internal error from Core", "RST_STREAM", "Stream removed")
"""How gRPC words it, under INTERNAL or UNKNOWN, when the peer dies while we are sending."""


def from_rpc(error: grpc.RpcError) -> OmnifleetError:
    """What a failed call means: the peer's own words if it sent them, else the transport's."""
    for key, value in getattr(error, "trailing_metadata", tuple)() or ():
        if key == TRAILER:
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OmnifleetError(Reason.DEADLINE, f"no answer before the deadline: {text}", retryable=True)
    if code is grpc.StatusCode.UNAVAILABLE or any(word in text for word in _CUT_OFF):
        return OmnifleetError(Reason.UNAVAILABLE, f"peer is not reachable: {text}", retryable=True)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OmnifleetError(Reason.LIMIT_EXCEEDED, text, knob="limits.message_bytes")
    return OmnifleetError(Reason.INTERNAL, f"{code.name}: {text}")


@contextmanager
def remote_errors() -> Iterator[None]:
    """Inside this block a failed gRPC call raises OmnifleetError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from error
