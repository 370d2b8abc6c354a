"""Messages between a policy's processes: JSON and bytes, over pipes and sockets."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

_MAX_HEADER = 16 << 20
_MAX_PAYLOAD = 64 << 30


def send(stream: BinaryIO, body: dict[str, Any], payload: bytes = b"") -> None:
    """Write one message. Raises OSError if nobody reads any more."""
    text = json.dumps(body).encode()
    stream.write(len(text).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + text)
    stream.write(payload)
    stream.flush()


def receive(stream: BinaryIO, *, most: int = _MAX_PAYLOAD) -> tuple[dict[str, Any], bytes] | None:
    """The next message, None at the end of the stream. Raises ValueError for what is no message, or of more than `most`
    bytes."""
    head = stream.read(12)
    if len(head) < 12:
        return None
    size, payload = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
    if size > min(_MAX_HEADER, most) or payload > most:
        raise ValueError(f"a message of {size} + {payload} bytes")
    text, data = stream.read(size), stream.read(payload)
    if len(text) < size or len(data) < payload:
        return None
    body: dict[str, Any] = json.loads(text)
    return body, data
