"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

_serial = itertools.count()
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY = 0o444
SCRATCH = ".part-"
"""Prefix of files that are being written, in a folder that goes with its process."""


def write_whole(
    path: str | Path,
    *parts: bytes | memoryview | Callable[[], memoryview],
    scratch_dir: Path,
    make_folder: bool = False,
    prepare: Callable[[int], None] | None = None,
) -> bool:
    """Write beside, make read-only, link into place; False if the name was taken, by whichever process was first.

    parts: one after the other; one that is called is asked for its bytes when its turn comes. `scratch_dir` is on the
    same file system. make_folder: make the folder of `path` if it is not there yet. prepare: called with the
    descriptor of the empty file. Raises OSError (ENOSPC included), and what a part raises; nothing is left behind then.
    """
    scratch = f"{scratch_dir}/{SCRATCH}{next(_serial)}"
    fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            if prepare is not None:
                prepare(fd)
            for part in parts:
                view = memoryview(part() if callable(part) else part).cast("B")
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, _READ_ONLY)
        finally:
            os.close(fd)
        try:
            os.link(scratch, path)
        except FileNotFoundError:
            if not make_folder:
                raise
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.link(scratch, path)
    except FileExistsError:
        return False
    else:
        return True
    finally:
        os.unlink(scratch)


def sync_path(path: Path) -> None:
    """Push a file or a folder to the platter."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def map_whole(path: Path) -> memoryview:
    """A read-only map of a file; it stays valid after the file is unlinked. Raises FileNotFoundError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    finally:
        os.close(fd)
