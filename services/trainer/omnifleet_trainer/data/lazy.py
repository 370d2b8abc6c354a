"""Rows that are made when they are asked for: what every set has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from omnifleet_trainer.data.rows import PromptRow


class LazyRows(Sequence[PromptRow]):
    """A set of which nothing but the rows in hand is in memory; its slices are such sets too.

    A subclass brings `__len__` and `_row`, and `_id` where an id can be told without its row.
    """

    @abstractmethod
    def _row(self, at: int) -> PromptRow:
        """Row `at`, 0 <= at < len."""

    def _id(self, at: int) -> str:
        """Id of row `at`."""
        return self._row(at).prompt_id

    @property
    def prompt_ids(self) -> list[str]:
        """All ids in order."""
        return [self._id(at) for at in range(len(self))]

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        places = range(len(self))[index]
        return self._row(places) if isinstance(places, int) else _Window(self, places)


class _Window(LazyRows):
    """Some rows of a set."""

    def __init__(self, rows: LazyRows, places: range) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def _row(self, at: int) -> PromptRow:
        return self._rows._row(self._places[at])

    def _id(self, at: int) -> str:
        return self._rows._id(self._places[at])


def ids_of(rows: Sequence[PromptRow]) -> list[str]:
    """Ids of any rows in order, without reading lazy ones."""
    return rows.prompt_ids if isinstance(rows, LazyRows) else [row.prompt_id for row in rows]
