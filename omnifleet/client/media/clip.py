"""All frames of an object in one file of the service's shared memory: FOLDER/object/DIGEST.

The distinct frames in the order in which they first appear, then an `ObjectInfo` as protobuf, then its length in four
bytes, little-endian. The info is checked against the address, so that a reader needs no call to know what it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from omnifleet.address import manifest_bytes, media_digest
from omnifleet.client.media.answers import MediaInfo, info_from_wire
from omnifleet.wire import media_pb2

CLIP_KIND = "object"
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """An object of several frames that is mapped as a whole. frames: in order, equal ones the same read-only array."""

    info: MediaInfo
    frames: tuple[npt.NDArray[np.uint8], ...]


def clip_tail(info: media_pb2.ObjectInfo) -> bytes:
    """What follows the frames in such a file."""
    message = info.SerializeToString()
    return message + len(message).to_bytes(_LENGTH_BYTES, "little")


def read_clip(data: memoryview, digest: str) -> Clip | None:
    """The object of that address in such a file, without a copy; None if the file is of another or is damaged.

    Its manifest is checked, its pixels are not.
    """
    body = len(data) - _LENGTH_BYTES
    size = int.from_bytes(data[max(body, 0) :], "little")
    if not 0 < size <= body:
        return None
    try:
        info = info_from_wire(media_pb2.ObjectInfo.FromString(bytes(data[body - size : body])))
    except (DecodeError, ValueError):
        return None
    distinct = {frame: i for i, frame in enumerate(dict.fromkeys(info.frame_digests))}
    frame_bytes = info.height * info.width * 3
    if not _is_of(info, digest) or frame_bytes * len(distinct) != body - size:
        return None
    pixels = np.frombuffer(data[: body - size], np.uint8).reshape(len(distinct), info.height, info.width, 3)
    views = list(pixels)
    return Clip(info, tuple(views[distinct[frame]] for frame in info.frame_digests))


def _is_of(info: MediaInfo, digest: str) -> bool:
    times_us = [round(s * 1_000_000) for s in info.timestamps_s]
    return media_digest(manifest_bytes(info.ref.kind, info.frame_digests, times_us)) == digest
