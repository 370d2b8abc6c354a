"""The shared-memory tier: files that processes of the same host map read-only.

BASE/omnifleet-media-ID/KIND/DIGEST, in huge pages where there are some. Everything here is in a tier below too, so
leaving this one loses nothing: leases are about content, not about this tier. Readers that say so by a file's
time of change keep it here longer.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.huge_pages import HUGE, make_room
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob, Name, Pack
from omnifleet_media.store.files import FULL, write_whole
from omnifleet_media.store.held import HeldFolder

_PREFIX = "omnifleet-media-"
Part = memoryview | bytes | Callable[[], memoryview]


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
        self._packs: dict[tuple[str, Digest], set[tuple[str, Digest]]] = {}  # by what they are of
        self._of: dict[tuple[str, Digest], Sequence[tuple[str, Digest]]] = {}
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

    def path(self, blob: Name) -> Path | None:
        """Where a reader may map the blob, if it is in this tier; marks it used."""
        with self._lock:
            if blob.key not in self._sizes:
                return None
            self._sizes.move_to_end(blob.key)
            return self._path(*blob.key)

    def write(self, blob: Name, data: memoryview) -> Path | None:
        """Bring a blob in, at the cost of others; None if it does not fit."""
        return self._write(blob, len(data), (data,), ())

    def write_pack(self, pack: Pack, open_blob: Callable[[Blob], memoryview]) -> Path | None:
        """Bring a pack in, at the cost of others; None if it does not fit. Raises what `open_blob` raises."""
        parts = [partial(open_blob, blob) for blob in pack.blobs]
        return self._write(pack, pack.bytes, (*parts, pack.tail), pack.of)

    def _write(
        self, blob: Name, size: int, parts: Sequence[Part], of: Sequence[tuple[str, Digest]]
    ) -> Path | None:
        path = self._path(*blob.key)
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
            placed = self._place(path, size, parts)
        finally:
            with self._lock:
                if not placed or blob.key in self._sizes:
                    self.used -= size
                if placed:
                    self._sizes[blob.key] = size
                    self._of[blob.key] = of
                    for part in of:
                        self._packs.setdefault(part, set()).add(blob.key)
                    self._read_ns[blob.key] = time.time_ns()
        return path if placed else None

    def _place(self, path: Path, size: int, parts: Sequence[Part]) -> bool:
        prepare = partial(make_room, size=size) if size >= HUGE else None
        while True:
            try:
                self._make_kind(path.parent)
                write_whole(path, *parts, scratch_dir=self.root, prepare=prepare)
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
                self._shrink(self.used - size)

    def _make_kind(self, folder: Path) -> None:
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            folder.chmod(self._mode)

    def remove(self, kind: str, digest: Digest) -> None:
        """Take a blob out, and the packs that it is in. Maps that readers hold stay whole."""
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
        for pack in tuple(self._packs.get(key, ())):
            self._remove(pack)
        for part in self._of.pop(key, ()):
            packs = self._packs.get(part, set())
            packs.discard(key)
            if not packs:
                self._packs.pop(part, None)
        size = self._sizes.pop(key, None)
        self._read_ns.pop(key, None)
        if size is not None:
            self.used -= size
            self._path(*key).unlink(missing_ok=True)
