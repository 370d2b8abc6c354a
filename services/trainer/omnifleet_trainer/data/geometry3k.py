"""geometry3k (Hugging Face hiyouga/geometry3k) from a local folder: `images`, `problem`, `answer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import open_table

SPLITS = ("train", "validation", "test")


def load_geometry3k(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """Rows of one split, shuffled by `seed`; prompt: template. Reward of the reference: 0.1 format + 0.9 math_expr.

    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no rows at `path`).
    """
    table = open_table(path, known_split(split, SPLITS, "geometry3k"))
    return SetRows(
        table, shuffled(len(table), seed), prefix=f"geometry3k/{split}", convert=partial(_convert, prompt)
    )


def _convert(prompt: str, raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
    return PromptRow(
        prompt_id=prompt_id,
        text=prompt.replace("{}", str(raw["problem"]).replace("<image>", "").strip()),
        images=tuple(image["bytes"] for image in raw["images"]),
        answer=str(raw["answer"]),
        task="geometry3k",
    )
