"""Rows of a named set under another task: its own reward, or an environment that plays it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omnifleet_trainer.data.lazy import LazyRows, ids_of
from omnifleet_trainer.data.rows import PromptRow


class Renamed(LazyRows):
    """The same rows and ids, `task` instead of the set's."""

    def __init__(self, rows: Sequence[PromptRow], task: str) -> None:
        self._rows, self._task = rows, task

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def prompt_ids(self) -> list[str]:
        """All ids in order."""
        return ids_of(self._rows)

    def _row(self, at: int) -> PromptRow:
        return replace(self._rows[at], task=self._task)
