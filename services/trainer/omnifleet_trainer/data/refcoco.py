"""RefCOCO (Hugging Face jxu124/refcoco, pictures of COCO 2014) from a local folder."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.rows import PromptRow, png
from omnifleet_trainer.data.sets import Pictures, SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import open_table

SPLITS = ("train", "validation", "test", "testB")
SIDE = 256


def load_refcoco(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """Rows of one split, shuffled by `seed`; pictures become 256 × 256, boxes whole thousandths of the sides.

    Training rows take one of a region's captions by chance, fixed by seed and row; other splits take the longest. Pictures
    lie in `path`/train2014. Reward of the reference: 0.1 format + 0.9 bbox_giou, giou_penalty_thres 0.5.
    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no rows at `path`).
    """
    table = open_table(path, known_split(split, SPLITS, "refcoco"))
    caption = partial(_by_chance, seed) if split == "train" else _longest
    convert = partial(_convert, prompt, Pictures(path), caption)
    return SetRows(table, shuffled(len(table), seed), prefix=f"refcoco/{split}", convert=convert)


def _by_chance(seed: int, prompt_id: str, captions: Sequence[str]) -> str:
    return random.Random(f"{seed}/{prompt_id}").choice(captions)


def _longest(prompt_id: str, captions: Sequence[str]) -> str:
    return max(captions, key=len)


def _convert(
    prompt: str, pictures: Pictures, caption: Any, raw: Mapping[str, Any], prompt_id: str
) -> PromptRow:
    encoded = pictures.read(str(raw["image_path"]).removeprefix("coco/"))
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            resized = png(image.convert("RGB").resize((SIDE, SIDE)))
    except OSError as error:
        raise invalid(f"{prompt_id}: {error}", reason=Reason.INVALID_MEDIA) from error
    sides = (width, height, width, height)
    box = [round(at / side * 1000) for at, side in zip(raw["bbox"], sides, strict=True)]
    return PromptRow(
        prompt_id=prompt_id,
        text=prompt.replace("{}", caption(prompt_id, list(raw["captions"]))),
        images=(resized,),
        answer=f"[{box[0]}, {box[1]}, {box[2]}, {box[3]}]",
        task="refcoco",
        extra={"image_size": [width, height], "resized_size": [SIDE, SIDE]},
    )
