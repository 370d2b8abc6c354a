"""Tables of every kind give the same rows; custom columns become prompt rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnifleet.config.recipe import SplitConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.data import load_split
from omnifleet_trainer.data.lazy import ids_of
from omnifleet_trainer.data.tables import Parquet, open_table

ROWS = [{"question": f"how many {n}?", "answer": str(n), "level": n % 3} for n in range(25)]


def _write(folder: Path, kind: str) -> Path:
    table = pa.Table.from_pylist(ROWS)
    if kind == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text(
            "\n".join(json.dumps(row) for row in ROWS[:10]) + "\n\n" + "\n".join(map(json.dumps, ROWS[10:]))
        )
        return path
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=4)
        return folder / "rows.parquet"
    if kind == "hub":
        (folder / "data").mkdir()
        pq.write_table(table.slice(0, 9), folder / "data" / "train-00000-of-00002.parquet", row_group_size=2)
        pq.write_table(table.slice(9), folder / "data" / "train-00001-of-00002.parquet")
        return folder
    (folder / "train").mkdir()
    for part, (start, rows) in enumerate(((0, 20), (20, 5))):
        with pa.OSFile(str(folder / "train" / f"data-{part:05d}-of-00002.arrow"), "wb") as out:
            with pa.ipc.new_stream(out, table.schema) as writer:
                writer.write_table(table.slice(start, rows), max_chunksize=7)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub", "arrow"])
def test_every_kind_of_table_gives_the_same_rows_in_any_order(tmp_path: Path, kind: str) -> None:
    table = open_table(_write(tmp_path, kind))
    assert len(table) == 25
    order = [24, 0, 9, 8, 20, 19, *range(25)]
    assert [table.row(at) for at in order] == [ROWS[at] for at in order]


def test_few_row_groups_stay_in_memory(tmp_path: Path) -> None:
    table = Parquet([_write(tmp_path, "parquet")])
    for at in range(25):
        table.row(at)
    assert len(table._kept) == 4


def test_what_is_not_a_table_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    for path, reason in (
        (tmp_path / "nowhere", Reason.NOT_FOUND),
        (tmp_path, Reason.NOT_FOUND),
        (tmp_path / "rows.csv", Reason.INVALID_REQUEST),
        (tmp_path / "broken.parquet", Reason.INVALID_REQUEST),
    ):
        with pytest.raises(OmnifleetError) as refusal:
            open_table(path)
        assert refusal.value.reason is reason and refusal.value.knob == "data.train.path"


def _custom(path: Path, **fields: Any) -> SplitConfig:
    return SplitConfig(dataset="custom", path=path, **fields)


def test_custom_columns_become_prompt_rows(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"png a")
    data_url = "data:image/png;base64," + base64.b64encode(b"png b").decode()
    row = {
        "q": "which?",
        "a": 7,
        "pics": ["pictures/a.png", data_url],
        "name": "first",
        "options": ["x", "y"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "ask.txt").write_text("Look. {} Answer {now}.")
    columns = {"text": "q", "answer": "a", "images": "pics", "id": "name"}
    rows = load_split(
        _custom(tmp_path / "rows.jsonl", columns=columns, prompt=tmp_path / "ask.txt", task="which"), seed=0
    )
    assert (len(rows), rows[0].prompt_id, rows[0].task) == (1, "which/train/first", "which")
    assert rows[0].text == "Look. which? Answer {now}."
    assert (rows[0].images, rows[0].answer, rows[0].extra) == (
        (b"png a", b"png b"),
        "7",
        {"options": ["x", "y"]},
    )
    assert rows.prompt_ids == ["which/train/first"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": "a", "pics": "../secret.png"}, Reason.FORBIDDEN),
        ({"question": "q", "answer": "a", "pics": "/etc/passwd"}, Reason.FORBIDDEN),
        ({"question": "q", "answer": "a", "pics": "missing.png"}, Reason.INVALID_MEDIA),
        ({"question": "q", "answer": "a", "pics": "data:image/png;base64,***"}, Reason.INVALID_MEDIA),
        ({"question": "q", "answer": None, "pics": None}, Reason.INVALID_REQUEST),
    ],
)
def test_rows_cannot_lead_anywhere_nor_lack_their_fields(
    tmp_path: Path, row: dict[str, Any], reason: Reason
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "rows.jsonl").write_text(json.dumps(row))
    columns = {"text": "question", "answer": "answer", "images": "pics"}
    rows = load_split(_custom(folder / "rows.jsonl", columns=columns), seed=0)
    with pytest.raises(OmnifleetError) as refusal:
        rows[0]
    assert refusal.value.reason is reason


def test_a_column_that_is_not_there_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    path = _write(tmp_path, "jsonl")
    with pytest.raises(OmnifleetError, match="has no column problem"):
        load_split(_custom(path, columns={"text": "problem", "answer": "answer"}), seed=0)
    (tmp_path / "ask.txt").write_text("no place for the text")
    with pytest.raises(OmnifleetError, match=r"no \{\} for the text"):
        load_split(_custom(path, prompt=tmp_path / "ask.txt"), seed=0)


def test_a_part_of_a_set_is_as_lazy_as_the_set(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"question": f"q{n}", "answer": "a"}) for n in range(9))
    )
    rows = load_split(_custom(tmp_path / "rows.jsonl", size=6), seed=0)
    part = rows[1::2]
    (tmp_path / "rows.jsonl").unlink()  # nothing was read ahead
    assert (len(rows), len(part)) == (6, 3)
    assert ids_of(part) == [f"custom/train/{at:08d}" for at in (1, 3, 5)]
    with pytest.raises(FileNotFoundError):
        part[0]
