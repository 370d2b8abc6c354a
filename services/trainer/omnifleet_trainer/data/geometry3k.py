"""geometry3k (Hugging Face hiyouga/geometry3k) from a local folder: `images`, `problem`, `answer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import open_table

SPLITS = ("train", "validation", "test")
PROMPT = (
    "{}\nReason about the figure between <think> and </think>. Then give the final answer between <answer> and "
    "</answer>: only a number or an expression."
)


def load_geometry3k(path: Path, split: str, seed: int) -> Sequence[PromptRow]:
    """Rows of one split, shuffled by `seed`. Reward of the reference: 0.1 format + 0.9 math_expr.

    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no rows at `path`).
    """
    table = open_table(path, known_split(split, SPLITS, "geometry3k"))
    return SetRows(table, shuffled(len(table), seed), prefix=f"geometry3k/{split}", convert=_convert)


def _convert(raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
    return PromptRow(
        prompt_id=prompt_id,
        text=PROMPT.replace("{}", str(raw["problem"]).replace("<image>", "").strip()),
        images=tuple(image["bytes"] for image in raw["images"]),
        answer=str(raw["answer"]),
        task="geometry3k",
    )
