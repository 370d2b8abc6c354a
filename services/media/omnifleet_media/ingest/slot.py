"""Which contract a source is decoded under: what the caller asks for, in the slot it was put into, as its bytes allow."""

from __future__ import annotations

from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet_media.address.contract import TRACK, DecodeContract, clip, still, track
from omnifleet_media.ingest.sniff import SourceType


def contract_for(
    asked: media_pb2.DecodeContract, believed: MediaKind | None, found: SourceType
) -> DecodeContract:
    """The contract for what the bytes are; the caller's belief matters where they can be more than one thing.

    A picture is a picture, except that an animated one in a video slot is a clip. A stream in an audio slot gives its
    sound, else its pictures; whether it has any is the decoder's to say. Raises OmnifleetError: UNSUPPORTED,
    INVALID_REQUEST.
    """
    if found.kind is MediaKind.IMAGE and not (found.animates and believed is MediaKind.VIDEO):
        return still(asked.background)
    wants_sound = believed is MediaKind.AUDIO or asked.sampling == TRACK
    is_sound = found.kind is MediaKind.AUDIO and believed is not MediaKind.VIDEO
    if wants_sound or is_sound:
        return track(asked.sample_rate)
    return clip(
        asked.sampling,
        asked.num_frames,
        asked.fps,
        asked.temporal_patch,
        asked.background,
        asked.indices,
    )
