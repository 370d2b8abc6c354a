"""The framing between the service and its processes: lengths, a JSON header, a body in the arena or behind it. No pickle."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from omnifleet_media.sandbox.arena import Arena

LENGTHS = struct.Struct("<IQ?")
"""Bytes of the header, bytes of the body, and whether the body is in the arena: then none follow the header."""
HEADER_BYTES = 1 << 20
"""Largest header; a longer one means that the other side has lost its mind."""

Header = dict[str, Any]
Room = Callable[[int], memoryview]
"""Memory for an answer of so many bytes where the other side reads it: the body that is written there is not copied again."""


def own_room(size: int) -> memoryview:
    """Memory of this process alone."""
    return memoryview(bytearray(size))


def receive(sock: socket.socket, arena: Arena, lane: int) -> tuple[Header, bytearray] | None:
    """The next frame of a blocking socket, whose body is in `lane`; None when the other side has closed."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, body_bytes, in_arena = LENGTHS.unpack(lengths)
    header = _exactly(sock, header_bytes)
    body = bytearray(arena.view(lane, body_bytes)) if in_arena else _exactly(sock, body_bytes)
    if header is None or body is None:
        return None
    return json.loads(header), body


def send(sock: socket.socket, arena: Arena, lane: int, header: Header, *bodies: bytes | memoryview) -> None:
    """Write one frame: the bodies, joined, to a lane, or after the header if they are too large for it."""
    text, in_arena = json.dumps(header).encode(), arena.put(lane, bodies)
    sock.sendall(LENGTHS.pack(len(text), sum(memoryview(b).nbytes for b in bodies), in_arena) + text)
    for body in () if in_arena else bodies:
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
