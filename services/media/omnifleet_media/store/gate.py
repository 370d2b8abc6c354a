"""Writers pass together, a remover passes alone: between all processes of one store.

A writer finds some of its blobs already there and relies on them until the index refers to them; a remover asks the
index which blobs nothing refers to, then deletes them. The two must not overlap. File locks: the dead let go at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omnifleet.errors import Reason, retryable

_PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01


class Gate:
    """Two files: whoever comes takes the turn first, so that a waiting remover is not overtaken for ever."""

    def __init__(self, folder: Path) -> None:
        self._turn, self._gate = folder / "turn", folder / "gate"

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Inside, no blob is removed. Raises OmnifleetError(OVERLOADED), retryable, after 30 seconds."""
        async with self._passing(fcntl.LOCK_SH):
            yield

    @asynccontextmanager
    async def removing(self) -> AsyncIterator[None]:
        """Inside, nobody writes. Raises OmnifleetError(OVERLOADED), retryable, after 30 seconds."""
        async with self._passing(fcntl.LOCK_EX):
            yield

    @asynccontextmanager
    async def _passing(self, kind: int) -> AsyncIterator[None]:
        end = time.monotonic() + _PATIENCE_S
        turn = await _locked(self._turn, fcntl.LOCK_EX, end)
        try:
            hold = await _locked(self._gate, kind, end)
        finally:
            os.close(turn)
        try:
            yield
        finally:
            os.close(hold)


async def _locked(path: Path, kind: int, end: float) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise retryable(
                        Reason.OVERLOADED, "other writers keep the store busy", retry_after_ms=1000
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    except BaseException:
        os.close(fd)
        raise
