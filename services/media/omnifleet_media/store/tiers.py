"""The tiers as one store.

Methods that read or write bytes block: callers run them in threads. `pinned` and `remove` are for the event loop only,
so that a removal never falls between pinning a blob and finding that it is already there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.disk import DiskTier
from omnifleet_media.store.files import map_whole
from omnifleet_media.store.maps import OpenMaps
from omnifleet_media.store.shared import SharedTier

_OPEN_MAPS_BYTES = 64 << 20


class Store:
    """Writes go through to disk, so that every acknowledged blob survives a kill; reads take the nearest tier."""

    def __init__(self, disk: DiskTier, shared: SharedTier) -> None:
        self.disk = disk
        self.shared = shared
        self._maps = OpenMaps(_OPEN_MAPS_BYTES)
        self._pinned: Counter[tuple[str, Digest]] = Counter()

    def write(self, pieces: Iterable[tuple[Blob, bytes | memoryview]]) -> None:
        """Store blobs whose bytes are known to be right. Raises OmnifleetError(DISK_FULL)."""
        for blob, data in pieces:
            self.disk.write(blob, data)
            if blob.shared:
                self.shared.write(blob, memoryview(data).cast("B"))

    def sync(self, blobs: Iterable[Blob]) -> None:
        """Make stored blobs survive a power cut."""
        for blob in blobs:
            if self.disk.has(blob):
                self.disk.sync(blob)

    def open(self, blob: Blob) -> memoryview:
        """Read-only bytes from the nearest tier; checked when they come from disk.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT.
        """
        data = self._maps.get(blob)
        if data is None:
            data = self._open_shared(blob) or self.disk.open(blob)
            self._maps.keep(blob, data)
        return data

    def map_path(self, blob: Blob) -> Path | None:
        """Where a same-host reader may map the blob; brings it from disk if need be. None: it does not fit.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT.
        """
        return self.shared.path(blob) or self.shared.write(blob, self.open(blob))

    def has(self, blob: Blob) -> bool:
        """Whether the blob's bytes are here."""
        return self.disk.has(blob)

    def tiers(self, blob: Blob) -> list[str]:
        """Names of the tiers that hold the blob."""
        held = {
            "memory": self._maps.get(blob) is not None,
            "shared_memory": self.shared.path(blob) is not None,
            "disk": self.disk.has(blob),
        }
        return [name for name, there in held.items() if there]

    def remove(self, kind: str, digest: Digest) -> int:
        """Delete a blob from every tier unless it is pinned; answers the bytes freed on disk."""
        if self._pinned[(kind, digest)]:
            return 0
        self._maps.drop(kind, digest)
        self.shared.remove(kind, digest)
        return self.disk.remove(kind, digest)

    @contextmanager
    def pinned(self, blobs: Iterable[Blob]) -> Iterator[None]:
        """Inside, these blobs are not removed: they are being written, and the index does not know them yet."""
        keys = [blob.key for blob in blobs]
        self._pinned.update(keys)
        try:
            yield
        finally:
            self._pinned.subtract(keys)
            self._pinned += Counter()  # drops the zeros

    def is_pinned(self, kind: str, digest: Digest) -> bool:
        """Whether somebody is writing the blob."""
        return self._pinned[(kind, digest)] > 0

    def close(self) -> None:
        """Remove the shared folder and let the disk go."""
        self.shared.close()
        self.disk.close()

    def _open_shared(self, blob: Blob) -> memoryview | None:
        path = self.shared.path(blob)
        try:
            return map_whole(path) if path is not None else None
        except FileNotFoundError:
            return None  # left the tier between the two lines
