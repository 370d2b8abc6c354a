"""The tiers as one store: open maps, shared memory, disk and, where one is configured, an object store.

Methods that read or write bytes block: callers run them in threads. Whoever writes or removes holds `gate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob, Pack
from omnifleet_media.store.disk import DiskTier
from omnifleet_media.store.files import map_whole
from omnifleet_media.store.maps import OpenMaps
from omnifleet_media.store.objects import ObjectTier
from omnifleet_media.store.shared import SharedTier

_OPEN_MAPS_BYTES = 64 << 20
Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Policy:
    """memory_bytes: maps kept open. upload_on_put: new content goes to the object store at once, not only when it must be
    durable or leaves the disk. share: when new content enters shared memory, at the put or when it is first asked for;
    `auto`: clips when asked for, where a call costs nothing beside a copy, and all else at the put.
    """

    memory_bytes: int = _OPEN_MAPS_BYTES
    share: Literal["auto", "put", "read"] = "auto"
    upload_on_put: bool = True

    def shared_at_put(self, pieces: Sequence[tuple[Blob, Data]]) -> list[tuple[Blob, Data]]:
        """Those of the pieces of one put that enter shared memory with it. A clip does so as one pack, not by its frames."""
        if self.share == "read":
            return []
        is_clip = sum(blob.kind == "frame" for blob, _ in pieces) > 1
        return [
            (blob, data) for blob, data in pieces if blob.shared and not (is_clip and blob.kind == "frame")
        ]


class Store:
    """Writes go through to disk, so that every acknowledged blob survives a kill; reads take the nearest tier."""

    def __init__(
        self,
        disk: DiskTier,
        shared: SharedTier,
        objects: ObjectTier | None = None,
        policy: Policy = Policy(),
    ) -> None:
        self.disk = disk
        self.shared = shared
        self.objects = objects
        self.gate = disk.gate
        self._policy = policy
        self._maps = OpenMaps(policy.memory_bytes)

    def write(self, pieces: Sequence[tuple[Blob, Data]]) -> None:
        """Store blobs whose bytes are known to be right. Raises OmnifleetError: DISK_FULL, UNAVAILABLE."""
        for blob, data in pieces:
            self.disk.write(blob, data)
            if self.objects is not None and self._policy.upload_on_put:
                self.objects.write(blob, data)
        self._share(pieces)

    def write_early(self, pieces: Sequence[tuple[Blob, Data]], *, of_clip: bool = False) -> list[bool]:
        """Store blobs before the gate is held and before the index is about to name them; False for what was here.

        They may be collected as orphans meanwhile: whoever holds the gate later looks again. Not for a store with an
        object store, whose uploads take long. Raises OmnifleetError(DISK_FULL).
        """
        assert self.objects is None
        placed = self.disk.write_all(pieces)
        if not of_clip:
            self._share(pieces)
        return placed

    def sync(self, blobs: Iterable[Blob]) -> None:
        """Make stored blobs survive a power cut, and the loss of this host if there is an object store."""
        for blob in blobs:
            if self.disk.has(blob):
                self.disk.sync(blob)
                if self.objects is not None:
                    self.objects.write(blob, self.disk.open(blob))

    def open(self, blob: Blob) -> memoryview:
        """Read-only bytes from the nearest tier, checked on the way up.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT, UNAVAILABLE.
        """
        data = self._maps.get(blob)
        if data is None:
            data = self._open_shared(blob) or self._open_disk(blob)
            self._maps.keep(blob, data)
        return blob.body(data)

    def map_path(self, blob: Blob) -> Path | None:
        """Where a same-host reader may map the blob; brings it from below if need be. None: it does not fit.

        Raises OmnifleetError: MEDIA_LOST, CORRUPT, UNAVAILABLE.
        """
        return self.shared.path(blob) or self.shared.write(blob, self.open(blob))

    def map_pack(self, pack: Pack) -> Path | None:
        """`map_path` of blobs that are mapped together."""
        return self.shared.path(pack) or self.shared.write_pack(pack, self.open)

    def has(self, blob: Blob) -> bool:
        """Whether the blob's bytes are here, or in the object store."""
        return self.disk.has(blob) or (self.objects is not None and self.objects.has(blob))

    def tiers(self, blob: Blob) -> list[str]:
        """Names of the tiers that hold the blob."""
        held = {
            "memory": self._maps.get(blob) is not None,
            "shared_memory": self.shared.path(blob) is not None,
            "disk": self.disk.has(blob),
            "object_store": self.objects is not None and self.objects.has(blob),
        }
        return [name for name, there in held.items() if there]

    def remove(self, kind: str, digest: Digest) -> int:
        """Delete a blob from every tier of this host; answers the bytes freed on disk."""
        self._maps.drop(kind, digest)
        self.shared.remove(kind, digest)
        return self.disk.remove(kind, digest)

    def demote(self, blob: Blob) -> int:
        """Leave a blob to the object store alone; answers the bytes freed on disk. Raises OmnifleetError: UNAVAILABLE."""
        assert self.objects is not None
        if not self.objects.has(blob):
            self.objects.write(blob, self.disk.open(blob))
        return self.remove(*blob.key)

    def close(self) -> None:
        """Remove the shared folder and let the disk go."""
        self.shared.close()
        self.disk.close()

    def _share(self, pieces: Sequence[tuple[Blob, Data]]) -> None:
        for blob, data in self._policy.shared_at_put(pieces):
            self.shared.write(blob, memoryview(data).cast("B"))

    def _open_shared(self, blob: Blob) -> memoryview | None:
        path = self.shared.path(blob)
        try:
            data = map_whole(path) if path is not None else None
        except FileNotFoundError:
            return None  # left the tier between the two lines
        if data is not None and not blob.matches(data):
            self.shared.remove(*blob.key)  # its owner's other processes could have written to it
            return None
        return data

    def _open_disk(self, blob: Blob) -> memoryview:
        if self.objects is None or self.disk.has(blob):
            with (
                contextlib.suppress(OmnifleetError) if self.objects is not None else contextlib.nullcontext()
            ):
                return self.disk.open(blob)
        assert self.objects is not None
        data = self.objects.open(blob)
        try:
            self.disk.write(blob, data)
        except OmnifleetError as error:
            if error.reason is not Reason.DISK_FULL:
                raise
        return data
