"""The object-store tier: blobs by digest in any file system that fsspec knows. Shared by hosts; checked on the way in."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Digest
from omnifleet_media.store.blob import Blob

_KNOB = "media.object_store"
_RENAMES = frozenset({"file", "local"})  # elsewhere an object appears whole; on a disk it has to be renamed


class ObjectTier:
    """URL/KIND/aa/DIGEST. Calls block; a backend that fails is UNAVAILABLE, retryable."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Opens the file system. Raises OmnifleetError(INVALID_CONFIG) if the URL or its backend is not known here."""
        try:
            import fsspec

            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"media.object_store {url!r} can't be opened: {error}",
                knob="pip install 'omnifleet-media[objects]' and the backend that fsspec names",
            ) from error
        self._url = url
        protocol = self._fs.protocol
        self._renames = bool(_RENAMES & ({protocol} if isinstance(protocol, str) else set(protocol)))

    def path(self, kind: str, digest: Digest) -> str:
        """Name of a blob in the file system."""
        return f"{self._root.rstrip('/')}/{kind}/{digest[:2]}/{digest}"

    def has(self, blob: Blob) -> bool:
        """Whether the blob is there; its bytes are checked when they are read."""
        with self._reaching():
            return bool(self._fs.exists(self.path(*blob.key)))

    def write(self, blob: Blob, data: bytes | memoryview) -> None:
        """Upload a blob; again is harmless. It appears whole or not at all. Raises OmnifleetError(UNAVAILABLE)."""
        if self.has(blob):
            return
        path = self.path(*blob.key)
        with self._reaching():
            if not self._renames:
                self._fs.pipe_file(path, bytes(data))
                return
            scratch = f"{path}.part-{uuid.uuid4().hex[:12]}"
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(scratch, bytes(data))
            self._fs.mv(scratch, path)

    def open(self, blob: Blob) -> memoryview:
        """The blob's bytes, checked. Raises OmnifleetError: MEDIA_LOST, UNAVAILABLE; CORRUPT (it is removed)."""
        path = self.path(*blob.key)
        with self._reaching():
            try:
                data = memoryview(self._fs.cat_file(path))
            except FileNotFoundError:
                raise OmnifleetError(
                    Reason.MEDIA_LOST,
                    f"{blob.kind} {blob.digest} is neither on disk nor in {self._url}; upload it again",
                ) from None
            if not blob.matches(data):
                self._fs.rm_file(path)
                raise OmnifleetError(
                    Reason.CORRUPT,
                    f"{blob.kind} {blob.digest} had other bytes in {self._url} than its digest says and was removed; "
                    "upload it again",
                )
        return data

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OmnifleetError:
            raise
        except Exception as error:  # each backend raises errors of its own
            raise retryable(
                Reason.UNAVAILABLE,
                f"the object store {self._url} failed: {type(error).__name__}: {error}",
                knob=_KNOB,
                retry_after_ms=1000,
            ) from error
