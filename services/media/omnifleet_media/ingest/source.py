"""One source on its way in: collected piece by piece under a limit, unwrapped, and recognised."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.ingest.data_url import data_url_payload, is_data_url
from omnifleet_media.ingest.sniff import SourceType, sniff

_URL_OVERHEAD = 4096  # header and padding of a data URL


@dataclass(frozen=True, slots=True)
class Source:
    """Plain bytes of a file and what they are."""

    data: bytes
    type: SourceType


class Intake:
    """Collects an upload and refuses it as soon as it is too large, before the rest is received."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._data = bytearray()

    @property
    def received(self) -> int:
        """Bytes so far."""
        return len(self._data)

    def add(self, piece: bytes) -> None:
        """Take the next piece. Raises OmnifleetError(LIMIT_EXCEEDED)."""
        # A data URL spends 4 characters on 3 bytes; its payload is measured when it is unwrapped.
        is_url = is_data_url(self._data or piece)
        allowed = self._limits.source_bytes
        if self.received + len(piece) > (allowed // 3 * 4 + _URL_OVERHEAD if is_url else allowed):
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the source is larger than {allowed} bytes",
                knob="media.limits.source_bytes",
            )
        self._data += piece

    def finish(self) -> Source:
        """The source. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED."""
        data = bytes(self._data)
        if is_data_url(data):
            data = data_url_payload(data, self._limits.source_bytes)
        if len(data) > self._limits.source_bytes:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the source has {len(data)} bytes, at most {self._limits.source_bytes} are allowed",
                knob="media.limits.source_bytes",
            )
        return Source(data, sniff(data))
