"""One JSON document a frame: 4 bytes of length, big-endian, then UTF-8. Both ends of a scorer process's pipes."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")
LIMIT_BYTES = 32 << 20
"""JSON escapes may double what fitted in one message of `omnifleet.wire.server`, which scorer processes do not import."""


def encode(document: Any) -> bytes:
    """The frame. Raises ValueError for NaN, infinities, and documents over LIMIT_BYTES."""
    body = json.dumps(document, allow_nan=False, ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"frame of {len(body)} bytes, at most {LIMIT_BYTES}")
    return _LENGTH.pack(len(body)) + body


def read_blocking(stream: BinaryIO) -> Any | None:
    """The next document, None at the end of the stream. Raises ValueError for a frame that is cut or too long."""
    head = stream.read(_LENGTH.size)
    if not head:
        return None
    size = _size(head)
    body = stream.read(size)
    if len(body) != size:
        raise ValueError("stream ended within a frame")
    return _decode(body)


async def read(stream: asyncio.StreamReader) -> Any:
    """The next document. Raises asyncio.IncompleteReadError at the end of the stream, ValueError for nonsense."""
    return _decode(await stream.readexactly(_size(await stream.readexactly(_LENGTH.size))))


def _size(head: bytes) -> int:
    if len(head) != _LENGTH.size:
        raise ValueError("stream ended within a frame")
    size = int(_LENGTH.unpack(head)[0])
    if size > LIMIT_BYTES:
        raise ValueError(f"frame of {size} bytes, at most {LIMIT_BYTES}")
    return size


def _decode(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))
