"""Questions about sounds (Hugging Face gijs/avqa-processed) from a local folder: `audio`, `question` with its choices, `answer`.

Only environments take sounds: the set is played by `omnifleet.environments.ask_once:AskOnce` unless a recipe names another.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import open_table

SPLITS = ("train", "validation")
_CHOICE = re.compile(r"^([A-Z])\.\s*(.+?)\s*$", re.MULTILINE)


def load_avqa(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """Rows of one split, shuffled by `seed`. An answer that is a choice's letter becomes its text.

    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no rows at `path`).
    """
    table = open_table(path, known_split(split, SPLITS, "avqa"))
    convert = partial(_convert, prompt)
    return SetRows(table, shuffled(len(table), seed), prefix=f"avqa/{split}", convert=convert)


def _convert(prompt: str, raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
    sound = raw["audio"]["bytes"]
    if not sound:
        raise invalid(f"{prompt_id} has no sound", reason=Reason.INVALID_MEDIA)
    question, answer = str(raw["question"]), str(raw["answer"]).strip()
    choices = dict(_CHOICE.findall(question.partition("\nChoices:")[2]))
    return PromptRow(
        prompt_id=prompt_id,
        text=prompt.replace("{}", question),
        images=(),
        answer=choices.get(answer.rstrip("."), answer),
        task="avqa",
        extra={"options": [{letter: text} for letter, text in choices.items()]},
        sounds=("data:audio/wav;base64," + base64.b64encode(sound).decode(),),
    )
