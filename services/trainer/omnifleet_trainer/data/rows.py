"""One row of any dataset, and the two controls that show how much of a score needs the pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class PromptRow:
    """One prompt: ``images`` are PNG bytes in the order the chat shows them, before ``text``.

    ``prompt_id`` is unique within and stable across runs; ``answer`` is what the scorer compares with, bare.
    ``extra`` is what else a scorer may need, as JSON values (options of a question, size of the picture).
    ``clips`` and ``sounds`` are where the media service reads them: file:// URLs below its allowed roots, or media://DIGEST. Only
    environments take them.
    """

    prompt_id: str
    text: str
    images: tuple[bytes, ...]
    answer: str
    task: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    clips: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()


def png(image: Image.Image) -> bytes:
    """Encode a picture as RGB PNG; equal pictures give equal bytes."""
    out = io.BytesIO()
    image.convert("RGB").save(out, format="PNG")
    return out.getvalue()


def blank_pictures(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The rows with each picture replaced by mid-grey of its own size."""

    def blank(data: bytes) -> bytes:
        with Image.open(io.BytesIO(data)) as image:
            return png(Image.new("RGB", image.size, (128, 128, 128)))

    return [replace(row, images=tuple(blank(data) for data in row.images)) for row in rows]


def shuffle_pictures(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The rows with each distinct set of pictures replaced by the next one: every question sees a wrong picture.

    Needs two distinct sets to change anything.
    """
    distinct = list(dict.fromkeys(row.images for row in rows))
    following = dict(zip(distinct, distinct[1:] + distinct[:1], strict=True))
    return [replace(row, images=following[row.images]) for row in rows]
