"""Rows of a named set under another task: its own reward, or an environment that plays it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from omnifleet_trainer.data.rows import PromptRow


class Renamed(Sequence[PromptRow]):
    """The same rows and ids, `task` instead of the set's."""

    def __init__(self, rows: Sequence[PromptRow], task: str) -> None:
        self._rows, self._task = rows, task

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def prompt_ids(self) -> list[str]:
        """All ids in order; reads a row only where the set knows no better."""
        known: list[str] | None = getattr(self._rows, "prompt_ids", None)
        return known if known is not None else [row.prompt_id for row in self._rows]

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return replace(self._rows[index], task=self._task)
