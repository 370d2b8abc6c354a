"""Typed errors. Each says what happened, whether the same call may succeed later, and which knob changes it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from omnifleet.types import WeightVersion


class Reason(StrEnum):
    """Stable names; clients and metrics match on them. The comment names the gRPC status."""

    INVALID_CONFIG = "invalid_config"  # INVALID_ARGUMENT
    INVALID_REQUEST = "invalid_request"  # INVALID_ARGUMENT
    INVALID_MEDIA = "invalid_media"  # INVALID_ARGUMENT
    PROMPT_TOO_LONG = "prompt_too_long"  # INVALID_ARGUMENT
    HISTORY_CHANGED = "history_changed"  # INVALID_ARGUMENT: a turn's history is not what the session holds
    LIMIT_EXCEEDED = "limit_exceeded"  # RESOURCE_EXHAUSTED
    NOT_FOUND = "not_found"  # NOT_FOUND
    MEDIA_LOST = "media_lost"  # NOT_FOUND
    UNAUTHENTICATED = "unauthenticated"  # UNAUTHENTICATED
    FORBIDDEN = "forbidden"  # PERMISSION_DENIED
    CONTRACT_MISMATCH = "contract_mismatch"  # FAILED_PRECONDITION
    VERSION_TOO_OLD = "version_too_old"  # UNAVAILABLE, retryable: the engine is behind the bound
    VERSION_MOVED = "version_moved"  # ABORTED, retryable: an exact bound broke during the reply
    LOGPROBS_MODE = "logprobs_mode"  # FAILED_PRECONDITION
    REFIT_REJECTED = "refit_rejected"  # FAILED_PRECONDITION: incomplete or corrupt
    NO_ROOM = "no_room"  # RESOURCE_EXHAUSTED: no memory for a shadow; the old version serves on
    FENCED = "fenced"  # UNAVAILABLE: the worker's weights are not whole
    OVERLOADED = "overloaded"  # RESOURCE_EXHAUSTED, retryable, with retry_after_ms
    NO_WORKER = "no_worker"  # UNAVAILABLE, retryable
    WORKER_LOST = "worker_lost"  # UNAVAILABLE, retryable
    DRAINING = "draining"  # UNAVAILABLE, retryable elsewhere
    ENGINE_ERROR = "engine_error"  # INTERNAL, retryable once
    DEADLINE = "deadline"  # DEADLINE_EXCEEDED, retryable
    UNAVAILABLE = "unavailable"  # UNAVAILABLE, retryable
    DISK_FULL = "disk_full"  # RESOURCE_EXHAUSTED
    PORT_TAKEN = "port_taken"  # FAILED_PRECONDITION
    MODEL_MISSING = "model_missing"  # FAILED_PRECONDITION
    UNSUPPORTED = "unsupported"  # UNIMPLEMENTED: this engine or model can't, said before work starts
    CORRUPT = "corrupt"  # DATA_LOSS
    CONFLICT = "conflict"  # ABORTED
    INTERNAL = "internal"  # INTERNAL


@dataclass(eq=False)
class OmnifleetError(Exception):
    """The one error that crosses service borders.

    message: one sentence that names field, value and what is allowed. knob: the setting to turn, or "".
    retryable: the same call may succeed later or elsewhere. retry_after_ms: advice in milliseconds, 0 = none.
    """

    reason: Reason
    message: str
    retryable: bool = False
    knob: str = ""
    retry_after_ms: int = 0
    current_version: WeightVersion | None = None

    def __str__(self) -> str:
        hint = f" (knob: {self.knob})" if self.knob else ""
        return f"{self.reason}: {self.message}{hint}"


def invalid(message: str, *, knob: str = "", reason: Reason = Reason.INVALID_REQUEST) -> OmnifleetError:
    """A caller's mistake: not retryable."""
    return OmnifleetError(reason, message, retryable=False, knob=knob)


def retryable(reason: Reason, message: str, *, knob: str = "", retry_after_ms: int = 0) -> OmnifleetError:
    """A passing condition: the same call may succeed later or on another worker."""
    return OmnifleetError(reason, message, retryable=True, knob=knob, retry_after_ms=retry_after_ms)


@contextmanager
def room_for(knob: str) -> Iterator[None]:
    """Raises OmnifleetError(DISK_FULL) in place of what the system says of a full disk or quota. knob: sets the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" for {error.filename}" if error.filename else ""
        raise OmnifleetError(Reason.DISK_FULL, f"the disk is full: no room{where}", knob=knob) from error
