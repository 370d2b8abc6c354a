"""How long an animation is shown, by what its file says of each frame; no pixel is decoded for it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

SHORTEST_MS = 10.0
INSTEAD_MS = 100.0  # what browsers show for a duration of nothing


def shown_ms(duration: float) -> float:
    """Milliseconds that viewers show a frame of this duration for."""
    return duration if duration > SHORTEST_MS else INSTEAD_MS


def length_s(codec: str, data: bytes) -> float:
    """Seconds of all frames of a GIF, PNG or WEBP file; 0 for another codec. A damaged file is read as far as it goes.

    Sources: GIF89a section 23 (graphic control extension), PNG third edition section 11.3.6.2 (fcTL), RFC 9649 section 2.7
    (ANMF).
    """
    read = {"GIF": _gif, "PNG": _png, "WEBP": _webp}.get(codec)
    if read is None:
        return 0.0
    total = 0.0
    try:
        for duration in read(data):
            total += shown_ms(duration)
    except (struct.error, IndexError):
        pass  # it is cut: the decoder says so
    return total / 1000


def _gif(data: bytes) -> Iterator[float]:
    """One duration an image; hundredths of a second in the control extension before it."""
    at, duration = 13 + _table(data[10]), 0.0
    while data[at] != 0x3B:
        if data[at] == 0x2C:
            yield duration
            duration = 0.0
            at = _behind_blocks(data, at + 11 + _table(data[at + 9]))
        elif data[at] == 0x21:
            if data[at + 1] == 0xF9:
                duration = 10.0 * struct.unpack_from("<H", data, at + 4)[0]
            at = _behind_blocks(data, at + 2)
        else:
            return


def _table(flags: int) -> int:
    """Bytes of the colour table that these flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    while data[at]:
        at += data[at] + 1
    return at + 1


def _png(data: bytes) -> Iterator[float]:
    at = 8
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"fcTL":
            part, whole = struct.unpack_from(">HH", data, at + 8 + 20)
            yield 1000.0 * part / (whole or 100)
        at += size + 12


def _webp(data: bytes) -> Iterator[float]:
    at = 12
    while at < len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"ANMF":
            low, high = struct.unpack_from("<HB", data, at + 8 + 12)
            yield float(low | high << 16)
        at += 8 + size + size % 2
