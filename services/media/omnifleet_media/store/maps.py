"""The memory tier: a few open maps, so that streaming the same blob again opens nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict

from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob


class OpenMaps:
    """Checked maps of at most `limit` bytes together, least recently used out first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self._maps: OrderedDict[tuple[str, Digest], memoryview] = OrderedDict()

    def get(self, blob: Blob) -> memoryview | None:
        """The map of a blob, if it is open."""
        with self._lock:
            data = self._maps.get(blob.key)
            if data is not None:
                self._maps.move_to_end(blob.key)
            return data

    def keep(self, blob: Blob, data: memoryview) -> None:
        """Remember a map."""
        with self._lock:
            self._forget(blob.key)
            self._maps[blob.key] = data
            self._used += len(data)
            while self._used > self._limit:
                self._forget(next(iter(self._maps)))

    def drop(self, kind: str, digest: Digest) -> None:
        """Forget a map; readers that still hold it keep it."""
        with self._lock:
            self._forget((kind, digest))

    def _forget(self, key: tuple[str, Digest]) -> None:
        data = self._maps.pop(key, None)
        if data is not None:
            self._used -= len(data)
