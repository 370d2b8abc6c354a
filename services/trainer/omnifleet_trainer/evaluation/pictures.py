"""Controls: the same questions with blank pictures, or with the pictures of other rows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from PIL import Image

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

Pictures = Literal["real", "blank", "shuffled"]
_GREY = (128, 128, 128)


def altered(rows: Sequence[PromptRow], pictures: Pictures) -> list[PromptRow]:
    """Rows with their own pictures, grey ones of the same size, or another row's (never an equal picture if any other
    picture with as many images exists)."""
    match pictures:
        case "real":
            return list(rows)
        case "blank":
            return [replace(row, images=tuple(_blank(data) for data in row.images)) for row in rows]
        case "shuffled":
            return [replace(row, images=_others(rows, index)) for index, row in enumerate(rows)]


def _others(rows: Sequence[PromptRow], index: int) -> tuple[bytes, ...]:
    own = rows[index].images
    for distance in range(1, len(rows)):
        # from half the set away: rows that follow one another often share a scene
        other = rows[(index + len(rows) // 2 + distance) % len(rows)].images
        if len(other) == len(own) and other != own:
            return other
    return own


def _blank(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data)) as picture:
        size = picture.size
    out = io.BytesIO()
    Image.new("RGB", size, _GREY).save(out, "PNG")
    return out.getvalue()
