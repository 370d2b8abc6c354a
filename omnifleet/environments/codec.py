"""Orders and what came of them, as frames between the pool and its processes: 4 bytes of length, then JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

from pydantic import TypeAdapter, ValidationError

from omnifleet.environments.episode import Episode
from omnifleet.environments.gateway import EXTRAS
from omnifleet.environments.outcome import Answered, Crashed, Lost, Outcome, PromptError, Scored, TimedOut
from omnifleet.environments.play import Order, Played
from omnifleet.errors import OmnifleetError, Reason, invalid

LIMIT_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_ORDER: TypeAdapter[Order] = TypeAdapter(Order)
_EPISODE: TypeAdapter[Episode] = TypeAdapter(Episode)
_OUTCOMES: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Scored, Answered, PromptError, Crashed, TimedOut)
}


def frame(document: dict[str, Any]) -> bytes:
    """The document as a frame. Raises LIMIT_EXCEEDED, and ValueError for NaN and infinities."""
    body = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES:
        raise invalid(f"a frame of {len(body)} bytes, at most {LIMIT_BYTES}", reason=Reason.LIMIT_EXCEEDED)
    return _LENGTH.pack(len(body)) + body


async def read_frame(stream: asyncio.StreamReader) -> dict[str, Any]:
    """The next document. Raises asyncio.IncompleteReadError at the end of the stream, ValueError for nonsense."""
    (size,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if size > LIMIT_BYTES:
        raise ValueError(f"frame of {size} bytes, at most {LIMIT_BYTES}")
    document = json.loads(await stream.readexactly(size))
    if not isinstance(document, dict):
        raise ValueError("a frame holds an object")
    return document


def order_to_json(order: Order) -> dict[str, Any]:
    """An order without the task's picture bytes, which travel by digest."""
    if order.task.pictures:
        raise invalid("the pictures of an order go into the media service first: task.media")
    body: dict[str, Any] = _ORDER.dump_python(order, mode="json")
    return body


def order_from_json(body: dict[str, Any]) -> Order:
    """Undo `order_to_json`. Raises ValueError."""
    return _ORDER.validate_python(body)


def played_to_json(played: Played) -> dict[str, Any]:
    """Outcome by kind, and the episode."""
    outcome: dict[str, Any]
    if isinstance(played.outcome, Lost):
        error = played.outcome.error
        names = ("reason", "message", "retryable", "knob", "retry_after_ms")
        outcome = {name: getattr(error, name) for name in names}
    else:
        outcome = _OUTCOMES[type(played.outcome).__name__].dump_python(played.outcome, mode="json")
    episode = None if played.episode is None else _episode_to_json(played.episode)
    return {"kind": type(played.outcome).__name__, "outcome": outcome, "episode": episode}


def played_from_json(body: dict[str, Any]) -> Played:
    """Undo `played_to_json`. Raises ValueError."""
    told = body["outcome"]
    try:
        if body["kind"] == "Lost":
            outcome: Outcome = Lost(OmnifleetError(**{**told, "reason": Reason(told["reason"])}))
        else:
            outcome = _OUTCOMES[body["kind"]].validate_python(told)
        episode = None if body["episode"] is None else _episode_from_json(body["episode"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"not an episode: {error}") from error
    return Played(outcome, episode)


def _episode_to_json(episode: Episode) -> dict[str, Any]:
    body: dict[str, Any] = _EPISODE.dump_python(episode, mode="json", exclude=set(EXTRAS))
    return body | {name: base64.b64encode(getattr(episode, name)).decode() for name in EXTRAS}


def _episode_from_json(body: dict[str, Any]) -> Episode:
    return _EPISODE.validate_python(body | {name: base64.b64decode(body[name]) for name in EXTRAS})
