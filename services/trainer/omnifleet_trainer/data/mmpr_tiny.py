"""MMPR-Tiny (Hugging Face OpenGVLab/MMPR-Tiny) from a local folder: mmpr_tiny.parquet and images.zip, or its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import Pictures, SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import Table, open_table

SPLITS = ("train", "val")
HOLD_OUT = 0.008
HOLD_OUT_SEED = 42


def load_mmpr_tiny(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """Rows with one picture; `val` is a hold-out of 0.8 % that seed 42 fixes, `train` the rest, shuffled by `seed`.

    Its own template adds nothing: the questions say how to answer. Reward of the reference: geo3k, format_score 0.1.
    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no table at `path`).
    """
    known_split(split, SPLITS, "mmpr-tiny")
    table = open_table(path / "mmpr_tiny.parquet" if path.is_dir() else path)
    folder = path if path.is_dir() else path.parent
    single = [at for at in range(len(table)) if _is_single(table, at)]
    order = [single[at] for at in shuffled(len(single), HOLD_OUT_SEED)]
    held_out = round(len(order) * HOLD_OUT) or min(1, len(order))
    chosen = order[:held_out] if split == "val" else order[held_out:]
    chosen = [chosen[at] for at in shuffled(len(chosen), seed)]
    pictures = Pictures(folder, archive="images.zip")
    return SetRows(table, chosen, prefix="mmpr-tiny", convert=partial(_convert, prompt, pictures))


def _is_single(table: Table, at: int) -> bool:
    images = table.row(at).get("images")
    return images is not None and len(images) == 1


def _convert(prompt: str, pictures: Pictures, raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
    text = str(raw["extra_info"]["question"])
    for placeholder in ("<image>", "<image_1>"):
        text = text.replace(placeholder, "")
    return PromptRow(
        prompt_id=prompt_id,
        text=prompt.replace("{}", text.strip()),
        images=(pictures.read(raw["images"][0]["path"]),),
        answer=str(raw["reward_model"]["ground_truth"]),
        task="mmpr-tiny",
    )
