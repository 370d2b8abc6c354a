"""Numbers that all processes of one store count together: bytes in use, blobs removed."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

_COUNT = struct.Struct("<q")


class Usage:
    """A counter in a mapped file. Who writes or removes counts first: a kill leaves it too high, never too low."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _COUNT.size)
        self._map = mmap.mmap(self._fd, _COUNT.size)
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """The count now."""
        return int(_COUNT.unpack_from(self._map)[0])

    def add(self, size: int) -> None:
        """Count `size` more; negative: fewer."""
        with self._lock:  # threads of this process share the descriptor, and with it the file lock
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self.set(self.value + size)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def set(self, value: int) -> None:
        """Start from a count that was made."""
        _COUNT.pack_into(self._map, 0, value)

    def close(self) -> None:
        """Let the file go."""
        self._map.close()
        os.close(self._fd)
