"""Datasets as prompt rows: every set becomes ``PromptRow`` through one loader, picked by name.

The room must not know models, tokenizers or the training loop: rows leave as text, PNG bytes and an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnifleet.errors import invalid
from omnifleet_trainer.data.clevr import load_clevr_cogent, load_synthetic_clevr
from omnifleet_trainer.data.rows import PromptRow, blank_pictures, shuffle_pictures

__all__ = ["DATASETS", "PromptRow", "blank_pictures", "load_rows", "shuffle_pictures"]

DATASETS: dict[str, Callable[[str, int, int | None], Sequence[PromptRow]]] = {
    "synthetic-clevr": load_synthetic_clevr,
    "clevr-cogent": load_clevr_cogent,
}


def load_rows(name: str, split: str, *, seed: int = 0, size: int | None = None) -> Sequence[PromptRow]:
    """The rows of one split of a registered set, in an order fixed by ``seed``; ``size`` None is all of them.

    Raises OmnifleetError (not retryable) for an unknown name or split, a size below 1, or a set whose files or
    libraries are not there.
    """
    if name not in DATASETS:
        raise invalid(f"unknown dataset {name!r}; known: {', '.join(sorted(DATASETS))}", knob="data.name")
    if size is not None and size < 1:
        raise invalid(f"dataset size must be at least 1, not {size}", knob="data.size")
    return DATASETS[name](split, seed, size)
