"""The shared-memory tier: files that processes of the same host and user map read-only.

BASE/omnifleet-media-ID/KIND/DIGEST. Everything here is on disk too, so leaving this tier loses nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import uuid
from collections import OrderedDict
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.files import FULL, write_whole

log = logging.getLogger("omnifleet.media")

_PREFIX = "omnifleet-media-"


class SharedTier:
    """A folder of this process, at most `limit` bytes, least recently used out first."""

    def __init__(self, base: Path, limit: int) -> None:
        """Removes what dead services of this user left, then makes the folder (mode 0700).

        Raises OmnifleetError(INVALID_CONFIG) if `base` can't be used.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[tuple[str, Digest], int] = OrderedDict()
        self.used = 0
        self.refused = 0
        try:
            _sweep(base)
            self._root, self._hold = _make(base)
        except OSError as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"shared memory {base} can't be used: {error}",
                knob="media.shared_memory",
            ) from error

    def path(self, blob: Blob) -> Path | None:
        """Where a reader may map the blob, if it is in this tier; marks it used."""
        with self._lock:
            if blob.key not in self._sizes:
                return None
            self._sizes.move_to_end(blob.key)
            return self._path(*blob.key)

    def write(self, blob: Blob, data: memoryview) -> Path | None:
        """Bring a blob in, at the cost of others; None if it does not fit."""
        path, size = self._path(*blob.key), len(data)
        with self._lock:
            if blob.key in self._sizes:
                return path
            if size > self._limit:
                self.refused += 1
                return None
            self._shrink(self._limit - size)
            self.used += size  # reserved; the file is written without the lock
        placed = False
        try:
            placed = self._place(path, data)
        finally:
            with self._lock:
                if not placed or blob.key in self._sizes:
                    self.used -= size
                if placed:
                    self._sizes[blob.key] = size
        return path if placed else None

    def _place(self, path: Path, data: memoryview) -> bool:
        while True:
            try:
                path.parent.mkdir(exist_ok=True)
                write_whole(path, data, scratch_dir=self._root)
            except OSError as error:
                if (
                    error.errno == errno.ENOENT
                ):  # somebody cleared the folder: readers stream from disk instead
                    self.refused += 1
                    return False
                if error.errno not in FULL:
                    raise
            else:
                return True
            with (
                self._lock
            ):  # the file system is smaller than media.shared_memory_bytes says, or others fill it
                if not self._sizes:
                    self.refused += 1
                    return False
                self._shrink(self.used - len(data))

    def remove(self, kind: str, digest: Digest) -> None:
        """Take a blob out. Maps that readers hold stay whole."""
        with self._lock:
            self._remove((kind, digest))

    def close(self) -> None:
        """Remove the folder; maps that readers hold stay whole."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._hold)

    def _path(self, kind: str, digest: Digest) -> Path:
        return self._root / kind / digest

    def _shrink(self, target: int) -> None:
        while self._sizes and self.used > max(target, 0):
            self._remove(next(iter(self._sizes)))

    def _remove(self, key: tuple[str, Digest]) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.used -= size
            self._path(*key).unlink(missing_ok=True)


def _make(base: Path) -> tuple[Path, int]:
    """A locked folder appears under its name only once it is locked: a sweep never takes it for a dead one."""
    base.mkdir(parents=True, exist_ok=True)
    scratch = base / f".{_PREFIX}{uuid.uuid4().hex}"
    scratch.mkdir(mode=0o700)
    fd = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    root = base / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    scratch.rename(root)
    return root, fd


def _sweep(base: Path) -> None:
    """The lock, not a process id, tells the dead: it also works between containers that share the folder."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another sweep was faster
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its service lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed %s, left by a service that was killed", folder)
        finally:
            os.close(fd)
