"""Pictures for people: thumbnails, whole frames, contact sheets of clips, waveforms of tracks; all as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Pixels = npt.NDArray[np.uint8]

SIDE = 512
_SHEET_FRAMES = 24
_SHEET_COLUMNS = 6
_CELL = 192
_CAPTION = 16
_GAP = 4
_PAPER, _INK, _WAVE = (24, 24, 27), (228, 228, 231), (96, 165, 250)


def frame_png(pixels: Pixels, side: int | None = None) -> bytes:
    """A frame, uint8 (H, W, 3), as PNG; shrunk so that no side is longer than `side`."""
    picture = Image.fromarray(pixels)
    if side is not None:
        picture.thumbnail((side, side))
    return _png(picture)


def sheet_positions(count: int) -> list[int]:
    """Which frames of a clip a contact sheet shows: at most 24, evenly spread, first and last among them."""
    shown = min(count, _SHEET_FRAMES)
    return [round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)]


def cell_of(pixels: Pixels) -> Image.Image:
    """One frame, small enough for a contact sheet."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((_CELL, _CELL))
    return picture


def contact_sheet(cells: Sequence[Image.Image], captions: Sequence[str]) -> bytes:
    """Cells of one size in rows of up to six, each above its caption."""
    columns = min(len(cells), _SHEET_COLUMNS)
    rows = -(-len(cells) // columns)
    width, height = cells[0].width + _GAP, cells[0].height + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (cell, caption) in enumerate(zip(cells, captions, strict=True)):
        x, y = _GAP + i % columns * width, _GAP + i // columns * height
        sheet.paste(cell, (x, y))
        draw.text((x + 2, y + cell.height + 1), caption, _INK, font)
    return _png(sheet)


def waveform(samples: npt.NDArray[np.float32], width: int = SIDE, height: int = 128) -> bytes:
    """The peaks of a mono track, one column of pixels for each equal share of the samples."""
    picture = Image.new("RGB", (width, height), _PAPER)
    draw, middle = ImageDraw.Draw(picture), height // 2
    for x, share in enumerate(np.array_split(np.nan_to_num(np.clip(samples, -1, 1)), width)):
        low, high = (float(share.min()), float(share.max())) if len(share) else (0.0, 0.0)
        draw.line((x, middle - high * (middle - 1), x, middle - low * (middle - 1)), _WAVE)
    return _png(picture)


def _png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()
