"""`omnifleet data` as it is typed: rows that are unfit are named, by the services that would meet them in a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from omnifleet.config.recipe import SplitConfig
from omnifleet.errors import OmnifleetError
from omnifleet_trainer.data import load_split
from omnifleet_trainer.data.command import app
from tests.integration.trainer_child import write_model
from tests.media_files import greys, h264


def png(side: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 199)).save(out, "PNG")
    return out.getvalue()


def recipe(folder: Path, rows: list[dict[str, object]], **data: object) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    write_model(folder / "model")
    columns = {"text": "question", "answer": "answer", "images": "image"}
    body = {
        "run": {"name": "t"},
        "model": {"path": str(folder / "model")},
        "reward": [{"name": "bbox_giou"}],
        "data": {
            "train": {"dataset": "custom", "path": str(folder / "train.parquet"), "columns": columns},
            "heldout": {"dataset": "custom", "path": str(folder / "train.parquet"), "columns": columns},
            "max_prompt_tokens": 40,
            **data,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.mark.timeout(180)
def test_check_names_every_unfit_row(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "where?", "answer": "[1,2,3,4]", "image": png(56)},
        {"question": "where? " * 10, "answer": "[1,2,3,4]", "image": png(56)},
        {"question": "where?", "answer": "[1,2,3,4]", "image": b"no picture"},
        {"question": "where?", "answer": "over there", "image": png(56)},
        {"question": "where?", "answer": " ", "image": png(56)},
    ]
    path = recipe(tmp_path, rows)
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1, done.output
    said = {line.split()[1]: line for line in done.output.splitlines() if line.startswith("row ")}
    assert sorted(said) == ["1", "2", "3", "4"], done.output
    assert "prompt_too_long" in said["1"] and "cannot be decoded" in said["2"]
    assert "bbox_giou" in said["3"] and "answer is empty" in said["4"]
    assert "5 rows, 4 unfit" in done.output
    done = CliRunner().invoke(app, ["check", str(path), "--rows", "1", "--no-score"])
    assert done.exit_code == 0 and "1 rows, 0 unfit" in done.output


def test_show_writes_a_page_that_escapes_what_rows_say_and_a_picture(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": f"<script>{i}</script>", "answer": str(i), "image": png(300)} for i in range(7)
    ]
    path = recipe(tmp_path, rows)
    for name in ("sheet.html", "sheet.png"):
        done = CliRunner().invoke(app, ["show", str(path), "--out", str(tmp_path / name), "--rows", "6"])
        assert done.exit_code == 0 and "6 rows" in done.output, done.output
    page = (tmp_path / "sheet.html").read_text()
    assert page.count("<article>") == 6 == page.count("data:image/png;base64,") and "<script>" not in page
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 5 * 192 and sheet.height > 192
        assert sheet.getpixel((100, 100)) == (9, 99, 199)
    assert isinstance(
        CliRunner().invoke(app, ["show", str(path), "--out", "x.gif"]).exception, OmnifleetError
    )


@pytest.mark.timeout(180)
def test_clips_are_converted_validated_and_decoded_by_the_media_service(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.mp4", tmp_path / "bad.mp4"
    good.write_bytes(h264(greys(4)))
    bad.write_bytes(b"no clip")
    rows = [
        {"prompt": f"{clip.name}? (A) up (B) down", "video": str(clip), "answer": "A"} for clip in (good, bad)
    ]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "rows.jsonl"
    run = CliRunner().invoke
    done = run(
        app, ["prepare-video", "convert", "--input", str(tmp_path / "plain.jsonl"), "--output", str(out)]
    )
    assert done.exit_code == 0 and "2 rows" in done.output, done.output
    done = run(app, ["prepare-video", "validate", "--input", str(out), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    done = run(app, ["prepare-video", "validate", "--input", str(out), "--root", str(tmp_path), "--decode"])
    assert done.exit_code == 1 and "2 rows, 1 unfit" in done.output, done.output
    assert "line 2: " in done.output


def test_sounds_of_avqa_are_rows_for_an_environment(tmp_path: Path) -> None:
    question = "What barks?\nChoices:\nA. a dog\nB. a cat"
    rows = [{"audio": {"bytes": b"RIFF", "path": "a.wav"}, "question": question, "answer": "A"}]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "train-0.parquet")
    (row,) = load_split(SplitConfig(dataset="avqa", path=tmp_path), seed=0)
    assert row.answer == "a dog" and row.sounds == ("data:audio/wav;base64,UklGRg==",) and not row.images
    assert question in row.text and row.extra["options"] == [{"A": "a dog"}, {"B": "a cat"}]
    template = tmp_path / "own.txt"
    template.write_text("Q: {}\n")
    (row,) = load_split(SplitConfig(dataset="avqa", path=tmp_path, prompt=template), seed=0)
    assert row.text == f"Q: {question}"
