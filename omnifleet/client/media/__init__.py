"""Clients of the media service: pictures in, references, pixels and model-ready tensors out.

On the service's host, frames and segments are mapped from its shared memory, read-only and without a copy; elsewhere
they are streamed and checked against their digests. What was read once is kept, up to a bound in bytes. Knows the wire
and the layout of the shared folder; nothing of the service's rooms.
"""

from omnifleet.client.media.answers import Collected, MediaInfo, Segment, Stat, Verified
from omnifleet.client.media.client import MediaClient
from omnifleet.client.media.sync import SyncMediaClient
from omnifleet.client.media.tensors import read_tensors

__all__ = [
    "MediaClient",
    "SyncMediaClient",
    "MediaInfo",
    "Segment",
    "Stat",
    "Collected",
    "Verified",
    "read_tensors",
]
