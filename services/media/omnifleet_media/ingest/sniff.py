"""What a source is, by its first bytes; names and declared types are not believed."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet_media.ingest import frame_manifest


@dataclass(frozen=True, slots=True)
class SourceType:
    """mime: what the bytes are. kind: what they hold, unless the caller believes otherwise of a container that can.

    codec: name of the format for the picture decoder, "" for streams. animates: a picture that may be a clip.
    """

    mime: str
    kind: MediaKind
    codec: str = ""
    animates: bool = False


_PREFIXES = (
    (b"\x89PNG\r\n\x1a\n", SourceType("image/png", MediaKind.IMAGE, "PNG")),
    (b"\xff\xd8\xff", SourceType("image/jpeg", MediaKind.IMAGE, "JPEG")),
    (b"GIF87a", SourceType("image/gif", MediaKind.IMAGE, "GIF", animates=True)),
    (b"GIF89a", SourceType("image/gif", MediaKind.IMAGE, "GIF", animates=True)),
    (b"BM", SourceType("image/bmp", MediaKind.IMAGE, "BMP")),
    (b"II*\x00", SourceType("image/tiff", MediaKind.IMAGE, "TIFF")),
    (b"MM\x00*", SourceType("image/tiff", MediaKind.IMAGE, "TIFF")),
    (b"\x1aE\xdf\xa3", SourceType("video/x-matroska", MediaKind.VIDEO)),
    (b"OggS", SourceType("video/ogg", MediaKind.VIDEO)),
    (b"FLV\x01", SourceType("video/x-flv", MediaKind.VIDEO)),
    (b"\x00\x00\x01\xba", SourceType("video/mpeg", MediaKind.VIDEO)),
    (b"fLaC", SourceType("audio/flac", MediaKind.AUDIO)),
    (b"ID3", SourceType("audio/mpeg", MediaKind.AUDIO)),
    (frame_manifest.MAGIC, SourceType(frame_manifest.MIME, MediaKind.VIDEO)),
    (frame_manifest.BUNDLE_MAGIC, SourceType("video/x-omnifleet-frames", MediaKind.VIDEO, "frames")),
)
_RIFF = {
    b"AVI ": SourceType("video/x-msvideo", MediaKind.VIDEO),
    b"WAVE": SourceType("audio/wav", MediaKind.AUDIO),
}
_AVIF, _HEIF = {b"avif", b"avis"}, {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}
_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip")
_TS_PACKET = 188
_LONGEST_PREFIX = 2048
KNOWN = "PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF; clips in MP4, MOV, Matroska, WebM, AVI, Ogg, FLV, MPEG; sound in WAV, FLAC, MP3"


def sniff(data: bytes | memoryview) -> SourceType:
    """The type of a source. Raises OmnifleetError: INVALID_MEDIA for empty or unknown bytes, UNSUPPORTED for HEIC."""
    head = bytes(data[:_LONGEST_PREFIX])
    if not head:
        raise OmnifleetError(Reason.INVALID_MEDIA, "the source is empty")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        animated = head[12:16] == b"VP8X" and bool(head[20:21]) and bool(head[20] & 0x02)
        return SourceType("image/webp", MediaKind.IMAGE, "WEBP", animates=animated)
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        return _of_brands(head)
    if head[4:8] in _QUICKTIME:
        return SourceType("video/quicktime", MediaKind.VIDEO)
    for prefix, source_type in _PREFIXES:
        if head.startswith(prefix):
            if source_type.codec == "PNG" and b"acTL" in head:
                return SourceType("image/apng", MediaKind.IMAGE, "PNG", animates=True)
            return source_type
    if head[0] == 0x47 and head[_TS_PACKET : _TS_PACKET + 1] in (b"", b"\x47"):
        return SourceType("video/mp2t", MediaKind.VIDEO)
    if (
        head[0] == 0xFF and len(head) > 1 and head[1] & 0xE0 == 0xE0
    ):  # MPEG audio and ADTS start with eleven ones
        return SourceType("audio/mpeg", MediaKind.AUDIO)
    raise OmnifleetError(Reason.INVALID_MEDIA, f"the source starts with {head[:8]!r}; known are {KNOWN}")


def _of_brands(head: bytes) -> SourceType:
    """A file of the ISO family by its brands: the first one, and those it is compatible with."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {head[8:12], *(head[i : i + 4] for i in range(16, end - 3, 4))}
    if brands & _AVIF:
        return SourceType("image/avif", MediaKind.IMAGE, "AVIF", animates=b"avis" in brands)
    if head[8:12] in _HEIF:
        raise OmnifleetError(
            Reason.UNSUPPORTED, "HEIC and HEIF pictures are not read here; send JPEG, PNG, WebP or AVIF"
        )
    if head[8:11] == b"M4A":
        return SourceType("audio/mp4", MediaKind.AUDIO)
    return SourceType("video/mp4", MediaKind.VIDEO)
