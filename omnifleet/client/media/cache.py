"""What a client has read already: bounded, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LocalCache(Generic[Key, Value]):
    """Values of at most `limit` (bytes, or whatever `size` counts) together. Any thread may call.

    Content never changes under its digest, so nothing here can be out of date. A value larger than the limit is not
    kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self.used = 0
        self.hits = 0

    def get(self, key: Key) -> Value | None:
        """The value, if it is here."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self.hits += 1
            self._kept.move_to_end(key)
            return found[0]

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Remember a value at the cost of others."""
        with self._lock:
            self._drop(key)
            if size > self._limit:
                return
            self._kept[key] = (value, size)
            self.used += size
            while self.used > self._limit:
                self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget everything; what callers hold stays whole."""
        with self._lock:
            self._kept.clear()
            self.used = 0

    def _drop(self, key: Key) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self.used -= found[1]
