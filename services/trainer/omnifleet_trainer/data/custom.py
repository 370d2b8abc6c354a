"""Rows of anybody's own table as prompt rows: columns are named in the recipe, the prompt is a template file."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.lazy import LazyRows
from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import Pictures
from omnifleet_trainer.data.tables import Table


class CustomRows(LazyRows):
    """A table's rows, turned one at a time when asked for.

    columns: field -> column, of `text`, `answer` and, where there are, `images` (one or a list) and `id`; other columns
    are in `PromptRow.extra` if they are JSON values. prompt: template with `{}` for the text. folder: what relative
    picture paths are relative to, and must not lead out of.
    """

    def __init__(
        self, table: Table, *, prefix: str, columns: Mapping[str, str], prompt: str, task: str, folder: Path
    ) -> None:
        self._table, self._prefix, self._columns = table, prefix, dict(columns)
        self._prompt, self._task, self._files = prompt, task, Pictures(folder)
        missing = {"text", "answer"} - self._columns.keys()
        if missing:
            raise invalid(f"columns must name {', '.join(sorted(missing))}", knob="data.train.columns")
        if len(table):
            self._check_columns(table.row(0))

    def __len__(self) -> int:
        return len(self._table)

    def _id(self, at: int) -> str:
        """Reads the row only where the table has a column of ids."""
        column = self._columns.get("id")
        return f"{self._prefix}/{f'{at:08d}' if column is None else self._table.row(at)[column]}"

    def _row(self, at: int) -> PromptRow:
        row = self._table.row(at)
        taken = set(self._columns.values())
        return PromptRow(
            prompt_id=self._id(at),
            text=self._prompt.replace("{}", str(self._field(row, "text", at))),
            images=tuple(self._pictures(row, at)),
            answer=str(self._field(row, "answer", at)),
            task=self._task,
            extra={key: value for key, value in row.items() if key not in taken and _is_json(value)},
        )

    def _check_columns(self, row: Mapping[str, Any]) -> None:
        unknown = [column for column in self._columns.values() if column not in row]
        if unknown:
            raise invalid(
                f"{self._prefix} has no column {', '.join(unknown)}; it has {', '.join(row)}",
                knob="data.train.columns",
                reason=Reason.INVALID_CONFIG,
            )

    def _field(self, row: Mapping[str, Any], field: str, at: int) -> Any:
        value = row.get(self._columns[field])
        if value is None:
            raise invalid(f"{self._prefix}, row {at}: column {self._columns[field]!r} is empty")
        return value

    def _pictures(self, row: Mapping[str, Any], at: int) -> list[bytes]:
        column = self._columns.get("images")
        value = row.get(column) if column else None
        if value is None:
            return []
        pictures = value if isinstance(value, list) else [value]
        return [self._picture(picture, at) for picture in pictures]

    def _picture(self, picture: Any, at: int) -> bytes:
        """Encoded bytes of a picture: bytes, the hub's {"bytes", "path"}, a data URL, or a path below the folder."""
        if isinstance(picture, Mapping):
            picture = picture.get("bytes") or picture.get("path")
        if isinstance(picture, bytes):
            return picture
        if not isinstance(picture, str):
            raise invalid(
                f"{self._prefix}, row {at}: a picture is bytes, a path or a data URL",
                reason=Reason.INVALID_MEDIA,
            )
        if picture.startswith("data:"):
            try:
                return base64.b64decode(picture.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise invalid(f"{self._prefix}, row {at}: {error}", reason=Reason.INVALID_MEDIA) from error
        return self._files.read(picture)


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_is_json(inner) for inner in value)
    return value is None or isinstance(value, str | bool | int | float)
