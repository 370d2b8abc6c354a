"""The disk tier: ROOT/KIND/aa/DIGEST, linked into place, read-only. Several processes may use it at once."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.files import FULL, map_whole, sync_path, write_whole
from omnifleet_media.store.gate import Gate
from omnifleet_media.store.held import HeldFolder
from omnifleet_media.store.usage import Usage

_SCRATCH_DIR = "incoming"
_JOIN_S = 120.0


class DiskTier:
    """One folder of one host. `gate` keeps its writers and removers apart; `id` names the folder."""

    def __init__(self, root: Path) -> None:
        """Takes the folder and clears what killed services were writing; the first to come counts what is there.

        Raises OmnifleetError: INVALID_CONFIG if the folder can't be used, CONFLICT if its first service does not get ready.
        """
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._hold, alone = _join(root / "lock")
            self._scratch = HeldFolder(root / _SCRATCH_DIR, "writer-")
            self._usage = Usage(root / "usage")
            self._removals = Usage(root / "removals")
            self.gate = Gate(root)
            self.id = _identity(root / "id", self._scratch.path)
            if alone:
                self._usage.set(sum(size for _, _, size in self.walk()))
            fcntl.flock(self._hold, fcntl.LOCK_SH)
        except OSError as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"the store {root} can't be used: {error}", knob="media.store"
            ) from error

    @property
    def used(self) -> int:
        """Bytes of all blobs, whichever process wrote them."""
        return self._usage.value

    @property
    def removals(self) -> int:
        """How many blobs were removed, by whichever process: as long as it stays the same, what was here is here."""
        return self._removals.value

    def path(self, kind: str, digest: Digest) -> Path:
        """Where a blob is, if it is there."""
        return Path(self._name(kind, digest))

    def _name(self, kind: str, digest: Digest) -> str:
        return f"{self._root}/{kind}/{digest[:2]}/{digest}"

    def has(self, blob: Blob) -> bool:
        """Whether the blob's file is there; its bytes are checked when they are read."""
        return os.path.exists(self._name(*blob.key))

    def size(self, kind: str, digest: Digest) -> int:
        """Bytes of a stored file, 0 if it is not there."""
        try:
            return self.path(kind, digest).stat().st_size
        except FileNotFoundError:
            return 0

    def write(self, blob: Blob, data: bytes | memoryview) -> bool:
        """Store a blob; False if it was here. Raises OmnifleetError(DISK_FULL); nothing half-written is left."""
        return self.write_all([(blob, data)])[0]

    def write_all(self, pieces: Sequence[tuple[Blob, bytes | memoryview]]) -> list[bool]:
        """Store blobs that are counted together; each whole or not at all. Raises OmnifleetError(DISK_FULL)."""
        lacking = [(blob, data) for blob, data in pieces if not self.has(blob)]
        size = sum(memoryview(data).nbytes for _, data in lacking)
        placed: dict[tuple[str, Digest], int] = {}
        try:
            if lacking:
                self._usage.add(size)
            for blob, data in lacking:
                if self._place(self._name(*blob.key), data):
                    placed[blob.key] = memoryview(data).nbytes
        except OSError as error:
            if error.errno in FULL:
                raise OmnifleetError(
                    Reason.DISK_FULL,
                    f"no space left under {self._root} for {size} bytes; free the disk, move the store "
                    "(media.store) or lower media.disk_bytes",
                    knob="media.store",
                ) from error
            raise
        finally:
            unplaced = size - sum(placed.values())
            if unplaced:
                self._usage.add(-unplaced)
        return [blob.key in placed for blob, _ in pieces]

    def _place(self, path: str, data: bytes | memoryview) -> bool:
        return write_whole(path, data, scratch_dir=self._scratch.path, make_folder=True)

    def sync(self, blob: Blob) -> None:
        """Make a stored blob survive a power cut: the file and the folders that lead to it."""
        path = self.path(*blob.key)
        for step in (path, *path.parents[:3]):
            sync_path(step)

    def open(self, blob: Blob) -> memoryview:
        """A map of the blob, checked against its digest. The file's time of change says when it was last read.

        Raises OmnifleetError: MEDIA_LOST if the file has gone; CORRUPT if its bytes are wrong (it is removed).
        """
        path = self.path(*blob.key)
        try:
            data = map_whole(path)
            os.utime(path)
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
            self._removals.add(1)
            path.unlink()
        except FileNotFoundError:
            return 0
        self._usage.add(-size)
        return size

    def walk(self, only: str = "") -> Iterator[tuple[str, Digest, int]]:
        """(kind, digest, bytes) of every blob on disk, or of one kind."""
        for kind in _folders(self._root):
            if kind.name == _SCRATCH_DIR or (only and kind.name != only):
                continue
            for first in _folders(kind.path):
                for name, found in _files(first.path):
                    yield kind.name, Digest(name), found.st_size

    def oldest(self) -> list[tuple[str, Digest, int]]:
        """(kind, digest, bytes) of every blob on disk, longest unread first."""
        found: list[tuple[int, str, Digest, int]] = []
        for kind, digest, size in self.walk():
            try:
                found.append((self.path(kind, digest).stat().st_mtime_ns, kind, digest, size))
            except FileNotFoundError:
                continue
        return [(kind, digest, size) for _, kind, digest, size in sorted(found)]

    def close(self) -> None:
        """Let the folder go."""
        self._scratch.close()
        self._usage.close()
        self._removals.close()
        os.close(self._hold)


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as files:
        for file in files:
            try:
                yield file.name, file.stat()
            except FileNotFoundError:
                continue  # another process evicts


def _join(path: Path) -> tuple[int, bool]:
    """A lock on the store, and whether nobody else is here: then it is exclusive until the caller has counted."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + _JOIN_S
    kind, alone = fcntl.LOCK_EX, True
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return fd, alone
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(fd)
                raise OmnifleetError(
                    Reason.CONFLICT,
                    f"another media service keeps the store {path.parent} closed",
                    knob="media.store",
                ) from None
        time.sleep(0.0 if alone else 0.05)
        kind, alone = fcntl.LOCK_SH, False


def _identity(path: Path, scratch_dir: Path) -> str:
    """The store's own name, written once."""
    write_whole(path, uuid.uuid4().hex.encode(), scratch_dir=scratch_dir)
    return path.read_text()
