"""The framing between the service and its processes: two lengths, a JSON header, raw bytes. No pickle."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<IQ")
"""Bytes of the header, bytes of the body."""
HEADER_BYTES = 1 << 20
"""Largest header; a longer one means that the other side has lost its mind."""

Header = dict[str, Any]


def pack(header: Header, body_bytes: int) -> bytes:
    """Lengths and header of a frame; the body follows as it is."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), body_bytes) + text


def receive(sock: socket.socket) -> tuple[Header, bytearray] | None:
    """The next frame of a blocking socket; None when the other side has closed."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    header, body = _exactly(sock, header_bytes), _exactly(sock, body_bytes)
    if header is None or body is None:
        return None
    return json.loads(header), body


def send(sock: socket.socket, header: Header, *bodies: bytes | memoryview) -> None:
    """Write one frame to a blocking socket; the bodies are joined on the way."""
    sock.sendall(pack(header, sum(memoryview(b).nbytes for b in bodies)))
    for body in bodies:
        sock.sendall(body)


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        got = sock.recv_into(view[filled:])
        if got == 0:
            return None
        filled += got
    return data
