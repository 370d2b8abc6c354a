"""The shared-memory tier: files that processes of the same host map read-only.

BASE/omnifleet-media-ID/KIND/DIGEST. Everything here is in a tier below too, so leaving this one loses nothing: leases
are about content, not about this tier. Readers that say so by a file's time of change keep it here longer.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.files import FULL, write_whole
from omnifleet_media.store.held import HeldFolder

_PREFIX = "omnifleet-media-"


class SharedTier:
    """A folder of this process, at most `limit` bytes, least recently used out first."""

    def __init__(self, base: Path, limit: int, *, for_everyone: bool = False) -> None:
        """Removes what dead services of this user left, then makes the folder.

        for_everyone: other users of the host may map its files (mode 0755, not 0700); nobody but its owner may write.
        Raises OmnifleetError(INVALID_CONFIG) if `base` can't be used.
        """
        self._limit = limit
        self._mode = 0o755 if for_everyone else 0o700
        self._lock = threading.Lock()
        self._sizes: OrderedDict[tuple[str, Digest], int] = OrderedDict()
        self._read_ns: dict[tuple[str, Digest], int] = {}
        self.used = 0
        self.refused = 0
        try:
            self._folder = HeldFolder(base, _PREFIX, self._mode)
        except OSError as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"shared memory {base} can't be used: {error}",
                knob="media.shared_memory",
            ) from error

    @property
    def root(self) -> Path:
        """The folder: readers find a blob at ROOT/KIND/DIGEST."""
        return self._folder.path

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
                    self._read_ns[blob.key] = time.time_ns()
        return path if placed else None

    def _place(self, path: Path, data: memoryview) -> bool:
        while True:
            try:
                self._make_kind(path.parent)
                write_whole(path, data, scratch_dir=self.root)
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

    def _make_kind(self, folder: Path) -> None:
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(self._mode)

    def remove(self, kind: str, digest: Digest) -> None:
        """Take a blob out. Maps that readers hold stay whole."""
        with self._lock:
            self._remove((kind, digest))

    def close(self) -> None:
        """Remove the folder; maps that readers hold stay whole."""
        self._folder.close()

    def _path(self, kind: str, digest: Digest) -> Path:
        return self.root / kind / digest

    def _shrink(self, target: int) -> None:
        spared: set[tuple[str, Digest]] = set()
        while self._sizes and self.used > max(target, 0):
            key = next(iter(self._sizes))
            if key not in spared and self._was_read(key):
                spared.add(key)
                self._sizes.move_to_end(key)
            else:
                self._remove(key)

    def _was_read(self, key: tuple[str, Digest]) -> bool:
        """Whether a reader marked the file since we last looked."""
        try:
            now_ns = os.stat(self._path(*key)).st_mtime_ns
        except FileNotFoundError:
            return False
        before_ns = self._read_ns.get(key)
        self._read_ns[key] = now_ns
        return before_ns is not None and now_ns > before_ns

    def _remove(self, key: tuple[str, Digest]) -> None:
        size = self._sizes.pop(key, None)
        self._read_ns.pop(key, None)
        if size is not None:
            self.used -= size
            self._path(*key).unlink(missing_ok=True)
