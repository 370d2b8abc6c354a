"""A process that works for the service: python -m omnifleet_media.sandbox.child ROLE SOCKET ARENA MEMORY_BYTES.

It sees frames on one inherited socket and in one inherited piece of memory, opens nothing, and dies with the service.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import logging
import os
import resource
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.arena import LANES, Arena
from omnifleet_media.sandbox.frames import Header, Room, receive, send
from omnifleet_media.sandbox.seccomp import give_up

ROLES = {
    "pictures": "omnifleet_media.decode.picture",
    "clips": "omnifleet_media.decode.stream",
    "segments": "omnifleet_media.segment.work",
}
"""Names of roles. A test may name a module of its own instead."""
# What libraries raise on damaged or hostile input; each ends one request, not the process.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_PR_SET_PDEATHSIG = 1


class Role(Protocol):
    """What a role's module offers. With `OPENS_FILES = True` it may go on to read files, as lazy imports do."""

    def prepare(self) -> Header:
        """Import what is heavy; answers facts such as library versions."""

    def work(
        self, header: Header, body: bytearray, room: Room
    ) -> tuple[Header, Sequence[bytes | memoryview]]:
        """Answer one request. Raises OmnifleetError for what it can name."""


def main() -> int:
    """Prepare, close the door, then answer frames until the service goes."""
    name, (fd, arena_fd, memory_bytes) = sys.argv[1], map(int, sys.argv[2:])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle
    logging.disable(logging.ERROR)  # advice of libraries to their developers
    sock, arena = socket.socket(fileno=fd), Arena(arena_fd)
    os.close(arena_fd)
    role: Role = cast(Role, importlib.import_module(ROLES.get(name, name)))
    facts = role.prepare()
    _limit(memory_bytes)
    unfiltered = give_up(opening=not getattr(role, "OPENS_FILES", False))
    send(sock, arena, 0, {**facts, "pid": os.getpid(), "unfiltered": unfiltered})
    for lane in itertools.cycle(range(LANES)):
        request = receive(sock, arena, lane)
        if request is None:
            break
        header, bodies = _answer(role, *request, functools.partial(arena.lend, lane))
        send(sock, arena, lane, header, *bodies)
    return 0


def _limit(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(
    role: Role, header: Header, body: bytearray, room: Room
) -> tuple[Header, Sequence[bytes | memoryview]]:
    try:
        return role.work(header, body, room)
    except OmnifleetError as error:
        return _refusal(error), ()
    except MemoryError:
        return _refusal(
            OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                "decoding needs more memory than a decoder process may use",
                knob="media.limits.decode_memory_bytes",
            )
        ), ()
    except DAMAGED as error:
        return _refusal(OmnifleetError(Reason.INVALID_MEDIA, f"{type(error).__name__}: {error}")), ()


def _refusal(error: OmnifleetError) -> Header:
    return {"error": {"reason": str(error.reason), "message": error.message, "knob": error.knob}}


if __name__ == "__main__":
    sys.exit(main())
