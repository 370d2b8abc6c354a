"""What a source is, by its first bytes; names and declared types are not believed."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind


@dataclass(frozen=True, slots=True)
class SourceType:
    """mime: what the bytes are. kind: what they hold. codec: Pillow's name of the format, "" for clips."""

    mime: str
    kind: MediaKind
    codec: str = ""


_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", SourceType("image/png", MediaKind.IMAGE, "PNG")),
    (b"\xff\xd8\xff", SourceType("image/jpeg", MediaKind.IMAGE, "JPEG")),
    (b"GIF87a", SourceType("image/gif", MediaKind.IMAGE, "GIF")),
    (b"GIF89a", SourceType("image/gif", MediaKind.IMAGE, "GIF")),
    (b"BM", SourceType("image/bmp", MediaKind.IMAGE, "BMP")),
    (b"II*\x00", SourceType("image/tiff", MediaKind.IMAGE, "TIFF")),
    (b"MM\x00*", SourceType("image/tiff", MediaKind.IMAGE, "TIFF")),
    (b"\x1aE\xdf\xa3", SourceType("video/x-matroska", MediaKind.VIDEO)),
    (b"OggS", SourceType("video/ogg", MediaKind.VIDEO)),
    (b"fLaC", SourceType("audio/flac", MediaKind.AUDIO)),
    (b"ID3", SourceType("audio/mpeg", MediaKind.AUDIO)),
)
_RIFF = {
    b"WEBP": SourceType("image/webp", MediaKind.IMAGE, "WEBP"),
    b"AVI ": SourceType("video/x-msvideo", MediaKind.VIDEO),
    b"WAVE": SourceType("audio/wav", MediaKind.AUDIO),
}
_AVIF_BRANDS = (b"avif", b"avis")
KNOWN = "PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF, and clips in MP4, MOV, Matroska, WebM, AVI or Ogg"


def sniff(data: bytes | memoryview) -> SourceType:
    """The type of a source. Raises OmnifleetError(INVALID_MEDIA) for empty or unknown bytes."""
    head = bytes(data[:16])
    if not head:
        raise OmnifleetError(Reason.INVALID_MEDIA, "the source is empty")
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        if head[8:12] in _AVIF_BRANDS:
            return SourceType("image/avif", MediaKind.IMAGE, "AVIF")
        return SourceType("video/mp4", MediaKind.VIDEO)
    for prefix, source_type in _PREFIXES:
        if head.startswith(prefix):
            return source_type
    raise OmnifleetError(Reason.INVALID_MEDIA, f"the source starts with {head[:8]!r}; known are {KNOWN}")
