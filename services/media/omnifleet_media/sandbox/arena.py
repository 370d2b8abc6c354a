"""Memory that the service and one of its processes share, for bodies: no pipe, and no page is made anew for each.

Two lanes, taken in turn: while one answer is read, the process works on the next request in the other. Whoever speaks
writes, whoever listens copies out before it looks: what is checked is no longer in the other's reach.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

LANES = 2
ARENA_BYTES = 64 << 20
"""Of a lane. Larger bodies go through the socket. Memory is taken as it is first used, and kept until the process ends."""


class Arena:
    """A memfd of a fixed size: neither side can shrink it under the other."""

    def __init__(self, fd: int) -> None:
        """Map a descriptor of `make_arena`, which the caller may then close. Raises OSError."""
        self._view = memoryview(mmap.mmap(fd, LANES * ARENA_BYTES))
        self._lent: memoryview | None = None

    def lend(self, lane: int, size: int) -> memoryview:
        """Memory for a body of `size` bytes, to be written where it will be read, and then `put` as it is."""
        at = lane * ARENA_BYTES
        self._lent = self._view[at : at + size] if size <= ARENA_BYTES else memoryview(bytearray(size))
        return self._lent

    def put(self, lane: int, bodies: Sequence[bytes | memoryview]) -> bool:
        """Write the bodies one after the other from the start of a lane; False if they do not fit."""
        lent, self._lent = self._lent, None
        if lent is not None and len(bodies) == 1 and bodies[0] is lent:
            return len(lent) <= ARENA_BYTES
        flat = [memoryview(body).cast("B") for body in bodies]
        if sum(map(len, flat)) > ARENA_BYTES:
            return False
        at = lane * ARENA_BYTES
        for body in flat:
            self._view[at : at + len(body)] = body
            at += len(body)
        return True

    def view(self, lane: int, size: int) -> memoryview:
        """The first `size` bytes of a lane, which the other side can still change."""
        return self._view[lane * ARENA_BYTES : lane * ARENA_BYTES + size]


def make_arena() -> int:
    """A descriptor for both sides; the caller closes it. Raises OSError."""
    fd = os.memfd_create("omnifleet-bodies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, LANES * ARENA_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
