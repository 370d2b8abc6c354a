"""An object of several frames as one file, which readers of this host map at once and without a call.

FOLDER/object/DIGEST: the distinct frames in the order in which they first appear, then `ObjectInfo` as protobuf, then its
length in four bytes, little-endian. The info's frames, kind and times are the manifest that DIGEST is the address of.
"""

from __future__ import annotations

from omnifleet.client.media.clip import CLIP_KIND, clip_tail
from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_to_wire
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.server.blobs import object_blobs
from omnifleet_media.store.blob import Pack


def object_pack(item: MediaObject) -> Pack:
    """What is mapped for all frames of an object."""
    *frames, manifest = object_blobs(item)
    tail = clip_tail(object_info(item))
    of = [manifest.key, *(frame.key for frame in frames)]
    return Pack(CLIP_KIND, item.digest, frames, tail, item.bytes + len(tail), of)


def object_info(item: MediaObject) -> media_pb2.ObjectInfo:
    """An object on the wire."""
    track = item.kind is MediaKind.AUDIO
    return media_pb2.ObjectInfo(
        ref=media_to_wire(item.ref),
        frame_digests=item.frames,
        timestamps_s=[us / 1_000_000 for us in item.timestamps_us],
        width=0 if track else item.width,
        height=0 if track else item.height,
        samples=item.width if track else 0,
        sample_rate=item.height if track else 0,
        bytes=item.bytes,
        facts=dict(item.facts),
    )
