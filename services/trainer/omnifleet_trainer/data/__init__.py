"""Datasets as prompt rows: every set becomes ``PromptRow`` through one loader, picked by name.

The room must not know models, tokenizers or the training loop: rows leave as text, PNG bytes and an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omnifleet.config.recipe import SplitConfig
from omnifleet.errors import invalid
from omnifleet_trainer.data.avqa import load_avqa
from omnifleet_trainer.data.clevr import load_clevr_cogent, load_clevr_folder, load_synthetic_clevr
from omnifleet_trainer.data.custom import CustomRows
from omnifleet_trainer.data.geometry3k import load_geometry3k
from omnifleet_trainer.data.gym_video import load_gym_video
from omnifleet_trainer.data.hub import fetch
from omnifleet_trainer.data.mixture import Mixture
from omnifleet_trainer.data.mmpr_tiny import load_mmpr_tiny
from omnifleet_trainer.data.own_tasks import load_own_tasks
from omnifleet_trainer.data.refcoco import load_refcoco
from omnifleet_trainer.data.renamed import Renamed
from omnifleet_trainer.data.rows import PromptRow, blank_pictures, shuffle_pictures
from omnifleet_trainer.data.tables import open_table
from omnifleet_trainer.data.templates import read_template, set_template

__all__ = [
    "DATASETS",
    "LOCAL_SETS",
    "Mixture",
    "PromptRow",
    "blank_pictures",
    "load_mixture",
    "load_rows",
    "load_split",
    "shuffle_pictures",
]

DATASETS: dict[str, Callable[[str, int, int | None], Sequence[PromptRow]]] = {
    "synthetic-clevr": load_synthetic_clevr,
    "clevr-cogent": load_clevr_cogent,
}
LOCAL_SETS: dict[str, Callable[[Path, str, int, str], Sequence[PromptRow]]] = {
    "avqa": load_avqa,
    "clevr-cogent": load_clevr_folder,
    "geometry3k": load_geometry3k,
    "gym-video": load_gym_video,
    "mmpr-tiny": load_mmpr_tiny,
    "refcoco": load_refcoco,
}
"""Sets of a known schema in a folder on disk: (folder, split, seed, template) -> rows."""


def load_rows(name: str, split: str, *, seed: int = 0, size: int | None = None) -> Sequence[PromptRow]:
    """The rows of one split of a registered set, in an order fixed by ``seed``; ``size`` None is all of them.

    Raises OmnifleetError (not retryable) for an unknown name or split, a size below 1, or a set whose files or
    libraries are not there.
    """
    if name not in DATASETS:
        known = ", ".join(sorted({*DATASETS, *LOCAL_SETS, "custom"}))
        raise invalid(f"unknown dataset {name!r}; known: {known}", knob="data.name")
    if size is not None and size < 1:
        raise invalid(f"dataset size must be at least 1, not {size}", knob="data.size")
    return DATASETS[name](split, seed, size)


def load_split(split: SplitConfig, *, seed: int, size: int | None = None) -> Sequence[PromptRow]:
    """The rows of one set of a recipe; `size` where the recipe says none. Raises what `load_rows` and tables raise."""
    size = split.size or size
    if split.dataset == "environment":
        return load_own_tasks(split, size, seed)
    if split.dataset in LOCAL_SETS and split.path is not None:
        if split.revision:
            fetch(split.dataset, split.split, split.path, split.revision)
        prompt = read_template(split.prompt) if split.prompt else set_template(split.dataset)
        rows = _of_task(LOCAL_SETS[split.dataset](split.path, split.split, seed, prompt), split)
        return rows if size is None else rows[:size]
    if split.dataset in LOCAL_SETS.keys() - DATASETS.keys():
        raise invalid(f"dataset {split.dataset} needs the folder that holds it", knob="data.train.path")
    if split.dataset != "custom" and split.path is not None:
        raise invalid(f"dataset {split.dataset} takes no path", knob="data.train.path")
    if split.path is None:
        return _of_task(load_rows(split.dataset, split.split, seed=seed, size=size), split)
    table = open_table(split.path, split.split)
    folder = split.path if split.path.is_dir() else split.path.parent
    own = CustomRows(
        table,
        prefix=f"{split.task_name}/{split.split}",
        columns=split.columns,
        prompt=read_template(split.prompt) if split.prompt else "{}",
        task=split.task_name,
        folder=folder,
    )
    return own if size is None else own[:size]


def _of_task(rows: Sequence[PromptRow], split: SplitConfig) -> Sequence[PromptRow]:
    """The rows under the set's own task name, where it has one."""
    return Renamed(rows, split.task_name) if split.task_name != split.dataset else rows


def load_mixture(splits: Sequence[SplitConfig], *, seed: int, size: int | None = None) -> Sequence[PromptRow]:
    """The rows of all sets: of one as they are, of several a `Mixture`."""
    loaded = [load_split(split, seed=seed, size=size) for split in splits]
    if len(loaded) == 1:
        return loaded[0]
    weights = [split.weight for split in splits if split.weight is not None]
    return Mixture(loaded, weights or None)
