"""What the named sets on disk share: a table in a folder, a converter, rows made one at a time when asked for."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.data.lazy import LazyRows
from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.tables import Table

_PICTURE_BYTES = 64 << 20

Convert = Callable[[Mapping[str, Any], str], PromptRow]
"""(raw row, prompt id) -> prompt row. Raises OmnifleetError for a row that cannot be used."""


class SetRows(LazyRows):
    """Rows of a table through `convert`. order: which rows, in which order; the id names a row's place in the table."""

    def __init__(self, table: Table, order: Sequence[int], *, prefix: str, convert: Convert) -> None:
        self._table, self._order, self._prefix, self._convert = table, order, prefix, convert

    def __len__(self) -> int:
        return len(self._order)

    def _id(self, at: int) -> str:
        return f"{self._prefix}/{self._order[at]:08d}"

    def _row(self, at: int) -> PromptRow:
        raw = self._table.row(self._order[at])
        try:
            return self._convert(raw, self._id(at))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise invalid(
                f"{self._id(at)} is not of its set's schema: {type(error).__name__}: {error}",
                reason=Reason.INVALID_CONFIG,
                knob="data.train.path",
            ) from error


def shuffled(count: int, seed: int) -> list[int]:
    """0 … count − 1 in an order that the seed fixes on every machine."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def known_split(split: str, known: Sequence[str], name: str) -> str:
    """The split. Raises INVALID_REQUEST if the set has no such split."""
    if split not in known:
        raise invalid(
            f"unknown split {split!r} of {name}; known: {', '.join(known)}", knob="data.train.split"
        )
    return split


class Pictures:
    """Pictures by their path below a folder, or in a zip archive that lies in it. Nothing outside is read."""

    def __init__(self, folder: Path, *, archive: str = "") -> None:
        """archive: name of the zip file; members may lack the first folder of a path."""
        self._folder = folder.resolve()
        self._archive = archive

    def read(self, name: str) -> bytes:
        """Encoded bytes. Raises FORBIDDEN, LIMIT_EXCEEDED, and INVALID_MEDIA where there is no such picture."""
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder):
            raise OmnifleetError(
                Reason.FORBIDDEN, f"{name} leads out of {self._folder}", knob="data.train.path"
            )
        if path.is_file():
            _check_size(path.stat().st_size, name)
            return path.read_bytes()
        for member in (name, name.partition("/")[2]):
            if member in self._members:
                _check_size(self._members[member].file_size, name)
                assert self._zip is not None
                return self._zip.read(member)
        where = f"{self._folder} or its {self._archive}" if self._archive else self._folder
        raise invalid(f"picture {name} is not in {where}", reason=Reason.INVALID_MEDIA)

    @cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        path = self._folder / self._archive
        return zipfile.ZipFile(path) if self._archive and path.is_file() else None

    @cached_property
    def _members(self) -> dict[str, zipfile.ZipInfo]:
        return {} if self._zip is None else {info.filename: info for info in self._zip.infolist()}


def _check_size(size: int, name: str) -> None:
    if size > _PICTURE_BYTES:
        raise invalid(
            f"picture {name} has {size} bytes, at most {_PICTURE_BYTES}", reason=Reason.LIMIT_EXCEEDED
        )
