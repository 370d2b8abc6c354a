"""The service's shared memory, mapped by this process: FOLDER/KIND/DIGEST, whole files that never change."""

from __future__ import annotations

import mmap
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from omnifleet import huge_pages

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_POPULATE = getattr(
    mmap, "MAP_POPULATE", 0
)  # whoever maps a frame reads it: all pages at once, not fault by fault
_DIGEST = re.compile(r"[0-9a-f]{64}")


class SharedFolder:
    """Where the service's shared content is, once the handshake or an answer has told: content is found without a call.

    A folder counts only if nobody but its owner can write to it. A new service makes a new folder; the old one is
    empty then, and the next answer tells the new one.
    """

    def __init__(self) -> None:
        self._folder = ""

    def learn(self, path: str) -> None:
        """Take the folder from the path of one file in it."""
        self.look_in(str(Path(path).parents[1]))

    def look_in(self, folder: str) -> None:
        """Take the folder, if it is on this host."""
        if folder != self._folder and _is_guarded(folder):
            self._folder = folder

    def open(
        self, kind: str, digest: str, size: int | None = None, *, at_once: bool = True
    ) -> memoryview | None:
        """A read-only map of `size` bytes (None: of however many), or None if it is not there (any more).

        kind: `frame`, `segment` or `object`. at_once: map all pages now, not as they are touched. Marks the file
        as read, where its owner lets us, so that the service keeps it in shared memory longer.
        """
        if not self._folder or not _DIGEST.fullmatch(digest):
            return None
        return map_file(f"{self._folder}/{kind}/{digest}", size, mark=True, at_once=at_once)


def map_file(path: str, size: int | None, *, mark: bool = False, at_once: bool = True) -> memoryview | None:
    """A read-only map of a file; None if it has gone, is not ours to see, or has another size."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        size = facts.st_size if size is None else size
        if facts.st_size != size or not size or not stat.S_ISREG(facts.st_mode):
            return None
        if mark:
            with suppress(PermissionError):
                os.utime(fd)
        return huge_pages.map_file(fd, size, _POPULATE if at_once else 0)
    finally:
        os.close(fd)


def _is_guarded(folder: str) -> bool:
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    writers = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(facts.st_mode) and not facts.st_mode & writers
