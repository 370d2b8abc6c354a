"""Rows on disk, read one at a time where they lie: JSON lines, Parquet, Arrow folders of Hugging Face `datasets`.

Nothing is loaded ahead: an open table holds its index only, so a set may be larger than memory.
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from omnifleet.errors import OmnifleetError, Reason, invalid

_GROUPS_KEPT = 4
_LINE_BYTES = 64 << 20  # a line without an end must not take all memory


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int:
        """Rows."""
        ...

    def row(self, at: int) -> dict[str, Any]:
        """Row `at` as column -> value. Raises INVALID_REQUEST for a row that cannot be read."""
        ...


class JsonLines:
    """One JSON object a line. Lines are found once, at the start; empty ones are not rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: list[int] = []
        with path.open("rb") as lines:
            at = 0
            while line := lines.readline(_LINE_BYTES):
                if line.strip():
                    self._offsets.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, at: int) -> dict[str, Any]:
        """See `Table`."""
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[at])
            try:
                body = json.loads(lines.readline(_LINE_BYTES))
            except ValueError as error:
                raise invalid(
                    f"{self._path}, row {at}: not JSON ({error})", knob="data.train.path"
                ) from error
        if not isinstance(body, dict):
            raise invalid(f"{self._path}, row {at}: not an object", knob="data.train.path")
        return body


class Parquet:
    """Parquet files one after the other; a few row groups stay decoded."""

    def __init__(self, paths: Sequence[Path]) -> None:
        import pyarrow.parquet as pq

        self._files = [pq.ParquetFile(path, memory_map=True) for path in paths]
        sizes = [
            (file, group, file.metadata.row_group(group).num_rows)
            for file in self._files
            for group in range(file.metadata.num_row_groups)
        ]
        self._groups = [(file, group) for file, group, _ in sizes]
        self._ends = _ends([rows for _, _, rows in sizes])
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, at: int) -> dict[str, Any]:
        """See `Table`."""
        place = bisect.bisect_right(self._ends, at)
        start = self._ends[place - 1] if place else 0
        return _row_of(self._group(place), at - start)

    def _group(self, place: int) -> Any:
        if place not in self._kept:
            file, group = self._groups[place]
            self._kept[place] = file.read_row_group(group)
            if len(self._kept) > _GROUPS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place]


class Arrow:
    """Arrow streams as `datasets.save_to_disk` writes them; mapped, not read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        import pyarrow as pa

        self._tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in paths]
        self._ends = _ends([table.num_rows for table in self._tables])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, at: int) -> dict[str, Any]:
        """See `Table`."""
        place = bisect.bisect_right(self._ends, at)
        start = self._ends[place - 1] if place else 0
        return _row_of(self._tables[place], at - start)


def open_table(path: Path, split: str = "train") -> Table:
    """The table at `path`: a .jsonl or .parquet file, or a folder.

    A folder holds `split` as a folder (`save_to_disk` of a DatasetDict), Arrow files, or Parquet and JSON-lines files
    whose names begin with the split, as on the Hugging Face hub (also under `data/`). Raises NOT_FOUND with what was
    looked for, INVALID_REQUEST for a file that is none of these.
    """
    for look in (_open_file, _open_folder):
        try:
            table = look(path, split)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise invalid(f"{path} cannot be read: {error}", knob="data.train.path") from error
        if table is not None:
            return table
    raise OmnifleetError(
        Reason.NOT_FOUND,
        f"no rows of split {split!r} at {path}: looked for a .jsonl or .parquet file, {split}/*.arrow, *.arrow, "
        f"{split}*.parquet, {split}*.jsonl, data/{split}*",
        knob="data.train.path",
    )


def _open_file(path: Path, split: str) -> Table | None:
    if not path.is_file():
        return None
    if path.suffix in (".jsonl", ".json"):
        return JsonLines(path)
    if path.suffix == ".parquet":
        return Parquet([path])
    raise invalid(f"{path} is neither .jsonl nor .parquet", knob="data.train.path")


def _open_folder(path: Path, split: str) -> Table | None:
    kinds: list[tuple[str, Callable[[list[Path]], Table]]] = [
        (f"{split}/*.arrow", Arrow),
        ("*.arrow", Arrow),
        (f"{split}*.parquet", Parquet),
        (f"data/{split}*.parquet", Parquet),
        (f"{split}/*.parquet", Parquet),
        (f"{split}*.jsonl", lambda paths: JsonLines(paths[0])),
        (f"data/{split}*.jsonl", lambda paths: JsonLines(paths[0])),
    ]
    for pattern, kind in kinds:
        found = sorted(path.glob(pattern))
        if found:
            return kind(found)
    return None


def _ends(sizes: Sequence[int]) -> list[int]:
    """Running totals: part k holds rows [ends[k - 1], ends[k])."""
    ends: list[int] = []
    for size in sizes:
        ends.append((ends[-1] if ends else 0) + size)
    return ends


def _row_of(table: Any, at: int) -> dict[str, Any]:
    return {name: table.column(name)[at].as_py() for name in table.column_names}
