"""From what an address means to a blob that can be checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from omnifleet.address import digest_bytes, frame_digest, media_digest, source_digest, track_digest
from omnifleet.types import Digest
from omnifleet_media.address.manifest import MediaObject, is_track
from omnifleet_media.index.port import Index, Kind, SegmentRecord
from omnifleet_media.server.record import manifest_of
from omnifleet_media.store.blob import Blob
from omnifleet_media.store.tiers import Store


def frame_blob(digest: Digest, height: int, width: int) -> Blob:
    """Canonical pixels, H x W x 3 bytes; or a track of W samples at H a second, 4 bytes each."""

    def measure(data: memoryview) -> Digest:
        if is_track(height, width, len(data)):
            return track_digest(np.frombuffer(data, "<f4"), height)
        if len(data) != height * width * 3:
            return Digest("")
        return frame_digest(np.frombuffer(data, np.uint8).reshape(height, width, 3))

    return Blob(Kind.FRAME, digest, digest, measure)


def manifest_blob(digest: Digest) -> Blob:
    """Canonical JSON of a media object."""
    return Blob(Kind.MANIFEST, digest, digest, _manifest_digest, shared=False, body=manifest_of)


def manifest_file(digest: Digest) -> Blob:
    """The same blob, read with the facts that lie beside the manifest."""
    return Blob(Kind.MANIFEST, digest, digest, _manifest_digest, shared=False)


def _manifest_digest(data: memoryview) -> Digest:
    return media_digest(bytes(manifest_of(data)))


def source_blob(digest: Digest) -> Blob:
    """A file as it was uploaded."""
    return Blob(Kind.SOURCE, digest, digest, source_digest, shared=False)


def segment_blob(key: Digest, content: Digest) -> Blob:
    """A safetensors file; its address is a key, so it is checked against the digest noted when it was made."""
    return Blob(Kind.SEGMENT, key, content, lambda data: digest_bytes(data, "tensors"))


def record_blob(record: SegmentRecord) -> Blob:
    """The blob of a segment."""
    return segment_blob(record.key, record.content)


def object_blobs(item: MediaObject) -> list[Blob]:
    """The frames of an object, each once, and its manifest."""
    frames = [frame_blob(frame, item.height, item.width) for frame in dict.fromkeys(item.frames)]
    return [*frames, manifest_blob(item.digest)]


async def holds(store: Store, blobs: Iterable[Blob]) -> bool:
    """Whether the bytes of all blobs are on this host, or in the object store."""
    if store.objects is None:
        return all(store.disk.has(blob) for blob in blobs)
    return await asyncio.to_thread(lambda: all(store.has(blob) for blob in blobs))


async def find_blob(index: Index, kind: Kind, digest: Digest) -> Blob | None:
    """The blob that the index knows under this kind and digest."""
    match kind:
        case Kind.FRAME:
            shape = await index.read_frame(digest)
            return frame_blob(digest, *shape) if shape else None
        case Kind.MANIFEST:
            return manifest_blob(digest) if await index.read_object(digest) else None
        case Kind.SOURCE:
            return source_blob(digest) if await index.has_source(digest) else None
        case Kind.SEGMENT:
            record = await index.read_segment(digest)
            return record_blob(record) if record else None
