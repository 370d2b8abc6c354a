"""clevr-cogent rows, drawn here or from the Hugging Face hub: one code path from either to prompt rows."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.data.lazy import LazyRows
from omnifleet_trainer.data.rows import PromptRow, png
from omnifleet_trainer.data.sets import SetRows, known_split, shuffled
from omnifleet_trainer.data.tables import open_table
from omnifleet_trainer.data.templates import set_template
from omnifleet_trainer.tiny.scenes import PROMPT, synthetic_rows

# split -> repository on the Hugging Face hub; each repository keeps its rows in a split named "train"
REPOSITORIES = {
    "train": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
    "valA": "MMInstruction/Clevr_CoGenT_ValA",
    "valB": "MMInstruction/Clevr_CoGenT_ValB",
}
GENERIC_PROMPT = set_template("clevr-cogent")
SYNTHETIC_ROWS = 4096


class ClevrRows(LazyRows):
    """Rows ``{image, problem, solution}`` as prompt rows, turned one at a time when asked for."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, prefix: str, prompt: str, task: str) -> None:
        self._rows, self._prefix, self._prompt, self._task = rows, prefix, prompt, task

    def __len__(self) -> int:
        return len(self._rows)

    def _id(self, at: int) -> str:
        return f"{self._prefix}/{at:06d}"

    def _row(self, at: int) -> PromptRow:
        row = self._rows[at]
        return PromptRow(
            prompt_id=self._id(at),
            text=self._prompt.format(row["problem"]),
            images=(_png_of(row["image"]),),
            answer=bare_answer(row["solution"]),
            task=self._task,
        )


def bare_answer(solution: str) -> str:
    """The text between the answer tags of a ``solution``; a solution without tags is its own answer."""
    found = re.search(r"<answer>(.*)</answer>", solution, re.DOTALL)
    return (found[1] if found else solution).strip()


def load_synthetic_clevr(split: str, seed: int, size: int | None) -> Sequence[PromptRow]:
    """Pictures drawn on the spot; splits ``train`` and ``val``; SYNTHETIC_ROWS rows unless ``size`` says otherwise."""
    rows = synthetic_rows(split, seed=seed, size=SYNTHETIC_ROWS if size is None else size)
    return ClevrRows(rows, prefix=f"synthetic-clevr/{split}/{seed}", prompt=PROMPT, task="synthetic-clevr")


def load_clevr_cogent(split: str, seed: int, size: int | None) -> Sequence[PromptRow]:
    """The real set through ``datasets``; splits ``train``, ``valA``, ``valB``; shuffled by ``seed``, cut to ``size``.

    Raises OmnifleetError: ``invalid_request`` for another split, ``unsupported`` without the library, ``not_found``
    where the hub or the local cache has no copy.
    """
    if split not in REPOSITORIES:
        raise invalid(
            f"unknown split {split!r} of clevr-cogent; known: {', '.join(REPOSITORIES)}", knob="data.split"
        )
    if importlib.util.find_spec("datasets") is None:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            "clevr-cogent needs the package 'datasets': pip install datasets",
            knob="data.name",
        )
    import datasets

    repository = REPOSITORIES[split]
    try:
        table = datasets.load_dataset(repository, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OmnifleetError(
            Reason.NOT_FOUND, f"cannot load {repository}: {error}", knob="data.name"
        ) from error
    table = table.shuffle(seed=seed)
    if size is not None:
        table = table.select(range(min(size, len(table))))
    return ClevrRows(table, prefix=f"clevr-cogent/{split}/{seed}", prompt=GENERIC_PROMPT, task="clevr-cogent")


def load_clevr_folder(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """The same set from a local copy of the split's repository, shuffled by `seed`. Reward of the reference: 0.2 format +
    0.8 exact_alnum.

    Raises INVALID_REQUEST (split, unreadable file), NOT_FOUND (no rows at `path`).
    """
    known_split(split, tuple(REPOSITORIES), "clevr-cogent")
    table = open_table(path, "train")  # each repository keeps its rows in a split of this name

    def convert(raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
        return PromptRow(
            prompt_id=prompt_id,
            text=prompt.replace("{}", raw["problem"]),
            images=(_png_of(raw["image"]),),
            answer=bare_answer(raw["solution"]),
            task="clevr-cogent",
        )

    return SetRows(table, shuffled(len(table), seed), prefix=f"clevr-cogent/{split}", convert=convert)


def _png_of(image: Any) -> bytes:
    """PNG bytes of a row's picture: a PIL image, encoded bytes, or the hub's undecoded ``{"bytes": ...}``."""
    if isinstance(image, Mapping):
        image = image.get("bytes")
    if isinstance(image, bytes):
        try:
            with Image.open(io.BytesIO(image)) as opened:
                return image if opened.format == "PNG" else png(opened)
        except OSError as error:
            raise invalid(
                f"a row's picture cannot be decoded: {error}", reason=Reason.INVALID_MEDIA
            ) from error
    if isinstance(image, Image.Image):
        return png(image)
    raise invalid(f"a row's picture must be a PIL image or bytes, not {type(image).__name__}")
