"""The disk tier: ROOT/KIND/aa/bb/DIGEST, renamed into place, read-only."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.files import FULL, map_whole, sync_path, write_whole

_SCRATCH_DIR = "incoming"


class DiskTier:
    """One folder, held by one service at a time. `used` counts the bytes of all blobs."""

    def __init__(self, root: Path) -> None:
        """Takes the folder, clears what a killed service was writing, and counts what is there.

        Raises OmnifleetError: CONFLICT if another service holds the folder, INVALID_CONFIG if it can't be used.
        """
        self._root = root
        self._lock = threading.Lock()
        try:
            self._scratch = root / _SCRATCH_DIR
            self._scratch.mkdir(parents=True, exist_ok=True)
            self._hold = _take(root / "lock")
            for leftover in self._scratch.iterdir():
                leftover.unlink()
        except OSError as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"the store {root} can't be used: {error}", knob="media.store"
            ) from error
        self.used = sum(size for _, _, size in self.walk())

    def path(self, kind: str, digest: Digest) -> Path:
        """Where a blob is, if it is there."""
        return self._root / kind / digest[:2] / digest[2:4] / digest

    def has(self, blob: Blob) -> bool:
        """Whether the blob's file is there; its bytes are checked when they are read."""
        return self.path(*blob.key).exists()

    def write(self, blob: Blob, data: bytes | memoryview) -> None:
        """Store a blob; again is harmless. Raises OmnifleetError(DISK_FULL); nothing half-written is left."""
        path = self.path(*blob.key)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, data, scratch_dir=self._scratch)
                with self._lock:
                    self.used += len(data)
        except OSError as error:
            if error.errno in FULL:
                raise OmnifleetError(
                    Reason.DISK_FULL,
                    f"no space left under {self._root} for {len(data)} bytes; free the disk, move the store "
                    "(media.store) or lower media.disk_bytes",
                    knob="media.store",
                ) from error
            raise

    def sync(self, blob: Blob) -> None:
        """Make a stored blob survive a power cut: the file and the folders that lead to it."""
        path = self.path(*blob.key)
        for step in (path, *path.parents[:4]):
            sync_path(step)

    def open(self, blob: Blob) -> memoryview:
        """A map of the blob, checked against its digest.

        Raises OmnifleetError: MEDIA_LOST if the file has gone; CORRUPT if its bytes are wrong (it is removed).
        """
        try:
            data = map_whole(self.path(*blob.key))
        except FileNotFoundError:
            raise OmnifleetError(
                Reason.MEDIA_LOST,
                f"{blob.kind} {blob.digest} is known but its bytes are gone; upload it again",
            ) from None
        if not blob.matches(data):
            self.remove(blob.kind, blob.digest)
            raise OmnifleetError(
                Reason.CORRUPT,
                f"{blob.kind} {blob.digest} had other bytes on disk than its digest says and was removed; upload it again",
            )
        return data

    def remove(self, kind: str, digest: Digest) -> int:
        """Delete a blob; answers the bytes freed, 0 if it was not there."""
        path = self.path(kind, digest)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        with self._lock:
            self.used -= size
        return size

    def walk(self) -> Iterator[tuple[str, Digest, int]]:
        """(kind, digest, bytes) of every blob on disk."""
        for kind in _folders(self._root):
            if kind.name == _SCRATCH_DIR:
                continue
            for first in _folders(kind.path):
                for second in _folders(first.path):
                    with os.scandir(second.path) as files:
                        for file in files:
                            yield kind.name, Digest(file.name), file.stat().st_size

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._hold)


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def _take(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OmnifleetError(
            Reason.CONFLICT, f"another media service uses the store {path.parent}", knob="media.store"
        ) from None
    return fd
