"""The reference's sets on disk, small and of their exact schema: rows → prompts → rewards worked out by hand."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from omnifleet.config.recipe import ScorerConfig, SplitConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply
from omnifleet_trainer.data import PromptRow, load_split

Row = dict[str, Any]


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, format=kind)
    return out.getvalue()


def write_table(folder: Path, split: str, rows: Sequence[Row]) -> Path:
    """As on the Hugging Face hub."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def load(
    dataset: str, path: Path | None, split: str, seed: int = 0, size: int | None = None
) -> Sequence[PromptRow]:
    return load_split(SplitConfig(dataset=dataset, path=path, split=split, size=size), seed=seed)


def reward(row: PromptRow, response: str, scorers: Mapping[str, float], **params: Any) -> float:
    """The reference's reward of a reply to the row; params of the last scorer."""
    last = list(scorers)[-1]
    configs = [
        ScorerConfig(name=name, weight=weight, params=params if name == last else {})
        for name, weight in scorers.items()
    ]
    built = Registry().reward(configs)
    reply = Reply(response, row.answer, row.text, extra=row.extra)
    verdicts = [term.scorer.judge(reply, term.params) for term in built.terms if term.scorer.judge]
    return built.total(verdicts).score


def refusal(dataset: str, path: Path | None, split: str) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        load(dataset, path, split)[0]
    return caught.value


def test_clevr_cogent(tmp_path: Path) -> None:
    rows = [
        {"image": {"bytes": picture(8, 6), "path": None}, "problem": f"How many? {n}", "solution": f"<answer> {n} </answer>"}
        for n in range(5)
    ]  # fmt: skip
    loaded = load("clevr-cogent", write_table(tmp_path, "train", rows), "valA", seed=3)
    assert sorted(row.answer for row in loaded) == list("01234")
    row = next(row for row in loaded if row.answer == "4")
    assert row.prompt_id == "clevr-cogent/valA/00000004" and row.text.startswith("How many? 4\n")
    clevr = {"format": 0.2, "exact_alnum": 0.8}
    assert reward(row, "four</think><answer>4</answer>", clevr) == pytest.approx(0.95)
    assert reward(row, "<think>x</think><answer>3</answer>", clevr) == pytest.approx(0.2)
    assert refusal("clevr-cogent", tmp_path, "val").reason is Reason.INVALID_REQUEST


def test_geometry3k(tmp_path: Path) -> None:
    image = {"bytes": picture(9, 9, "JPEG"), "path": None}
    rows = [{"images": [image], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"}]
    (row,) = load("geometry3k", write_table(tmp_path, "validation", rows), "validation")
    assert row.text.startswith("Find x.\n") and "<think>" in row.text and row.images == (image["bytes"],)
    geometry = {"format": 0.1, "math_expr": 0.9}
    assert reward(row, "<think>x</think><answer>2\\sqrt{221}</answer>", geometry) == pytest.approx(1)
    assert reward(row, "x</think><answer>\\sqrt{884}</answer>", geometry) == pytest.approx(0.975)
    assert reward(row, "x</think><answer>29</answer>", geometry) == pytest.approx(0.075)


def mmpr(folder: Path, count: int, *, zipped: bool) -> Path:
    """`count` rows with one picture, and one with two, which is left out."""
    rows = []
    for n in range(count + 1):
        names = [f"MMPR-Tiny/images/{n}.png"] + (["MMPR-Tiny/images/0.png"] if n == count else [])
        rows.append(
            {
                "images": [{"path": name} for name in names],
                "extra_info": {"question": f"<image>\nWhat is {n}?"},
                "reward_model": {"ground_truth": str(n)},
            }
        )
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "mmpr_tiny.parquet")
    pictures = {f"images/{n}.png": picture(n + 1, 1) for n in range(count + 1)}
    if zipped:
        with zipfile.ZipFile(folder / "images.zip", "w") as archive:
            for name, data in pictures.items():
                archive.writestr(name, data)
    else:
        (folder / "MMPR-Tiny" / "images").mkdir(parents=True)
        for name, data in pictures.items():
            (folder / "MMPR-Tiny" / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_mmpr_tiny(tmp_path: Path, zipped: bool) -> None:
    folder = mmpr(tmp_path / "mmpr", 250, zipped=zipped)
    held_out, train = load("mmpr-tiny", folder, "val"), load("mmpr-tiny", folder, "train", seed=1)
    assert (len(held_out), len(train)) == (2, 248)  # 0.8 % of 250
    ids = {row_id for rows in (held_out, train) for row_id in rows.prompt_ids}  # type: ignore[attr-defined]
    assert len(ids) == 250 and "mmpr-tiny/00000250" not in ids
    other = load("mmpr-tiny", folder, "val", seed=7)
    assert {row.prompt_id for row in other} == {row.prompt_id for row in held_out}  # whatever the run's seed
    row = train[0]
    n = int(row.answer)
    assert row.text == f"What is {n}?"
    assert Image.open(io.BytesIO(row.images[0])).size == (n + 1, 1)
    assert reward(row, f"so</think> \\boxed{{{n}.0}}", {"geo3k": 1.0}, format_score=0.1) == pytest.approx(1)
    assert reward(row, f"\\boxed{{{n}}}", {"geo3k": 1.0}, format_score=0.1) == pytest.approx(0.9)


def test_refcoco(tmp_path: Path) -> None:
    name = "COCO_train2014_000000581857.jpg"
    (tmp_path / "train2014").mkdir()
    (tmp_path / "train2014" / name).write_bytes(picture(640, 480, "JPEG"))
    captions = ["man", "the man on the left", "left man"]
    raw = {"image_path": f"coco/train2014/{name}", "bbox": [160.0, 120.0, 320.0, 240.4], "captions": captions}
    write_table(tmp_path, "train", [raw] * 20)
    write_table(tmp_path, "validation", [raw])
    (row,) = load("refcoco", tmp_path, "validation")
    assert "describes: the man on the left\n" in row.text
    assert row.answer == "[250, 250, 500, 501]"
    assert Image.open(io.BytesIO(row.images[0])).size == (256, 256)
    train = load("refcoco", tmp_path, "train")
    texts = [row.text for row in train]
    assert len(set(texts)) == 3 and texts == [row.text for row in load("refcoco", tmp_path, "train")]
    refcoco = {"format": 0.1, "bbox_giou": 0.9}
    whole = "<think>x</think><answer>[250,250,500,501]</answer>"
    assert reward(row, whole, refcoco, giou_penalty_thres=0.5) == pytest.approx(1)
    # I 250·250, U = C = 250·251: IoU 250/251
    almost = "<think>x</think><answer>[250, 250, 500, 500]</answer>"
    assert reward(row, almost, refcoco, giou_penalty_thres=0.5) == pytest.approx(0.1 + 0.9 * 250 / 251)
    pixels = {"giou_penalty_thres": 0.5, "truth_unit": "per_mille", "answer_unit": "resized"}
    in_resized = "<think>x</think><answer>[64,64,128,128.256]</answer>"  # 256 pixels a side
    assert reward(row, in_resized, refcoco, **pixels) == pytest.approx(1)


def test_what_is_not_there_or_not_of_the_schema_is_told(tmp_path: Path) -> None:
    assert refusal("geometry3k", None, "train").knob == "data.train.path"
    assert refusal("geometry3k", tmp_path, "train").reason is Reason.NOT_FOUND
    assert refusal("synthetic-clevr", tmp_path, "train").knob == "data.train.path"
    assert "refcoco" in refusal("refcoc", None, "train").message
    write_table(tmp_path, "train", [{"problem": "x"}])
    wrong = refusal("geometry3k", tmp_path, "train")
    assert wrong.reason is Reason.INVALID_CONFIG and "images" in wrong.message
    escape = tmp_path / "escape"
    secret = {"image_path": "coco/../../secret.jpg", "bbox": [0.0, 0.0, 1.0, 1.0], "captions": ["x"]}
    write_table(escape, "train", [secret])
    assert refusal("refcoco", escape, "train").reason is Reason.FORBIDDEN
    absent = mmpr(tmp_path / "absent", 3, zipped=False)
    for file in (absent / "MMPR-Tiny" / "images").iterdir():
        file.unlink()
    assert refusal("mmpr-tiny", absent, "train").reason is Reason.INVALID_MEDIA
