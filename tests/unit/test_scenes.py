"""Synthetic scenes, and the one code path from clevr-cogent rows to prompt rows."""

import io
import random
from collections import Counter, defaultdict

import pytest
from PIL import Image

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.data import blank_pictures, load_rows, shuffle_pictures
from omnifleet_trainer.data.clevr import GENERIC_PROMPT, ClevrRows, bare_answer
from omnifleet_trainer.data.rows import png
from omnifleet_trainer.tiny.scenes import (
    ANSWERS,
    COLOURS,
    SIDE,
    Thing,
    chance_accuracy,
    content_of,
    draw,
    questions_about,
    scenes,
    split_of,
    synthetic_rows,
)


def test_questions_of_a_known_scene() -> None:
    scene = (Thing(0, "circle", "red"), Thing(4, "square", "red"), Thing(8, "ring", "blue"))
    answers = {question.text: question.answer for question in questions_about(scene)}
    assert answers["How many red things?"] == "2"
    assert answers["How many green things?"] == "0"
    assert answers["What colour is the square?"] == "red"
    assert answers["What shape is the blue thing?"] == "ring"
    assert "What shape is the red thing?" not in answers  # two of them
    assert answers["Is there a red circle?"] == "yes"
    assert answers["Is there a blue circle?"] == "no"


def test_drawing_shows_each_colour_in_its_cell() -> None:
    image = draw((Thing(0, "square", "red"), Thing(8, "circle", "blue")), random.Random(0))
    assert image.size == (SIDE, SIDE)
    assert image.getpixel((14, 14)) == COLOURS["red"]
    assert image.getpixel((SIDE - 14, SIDE - 14)) == COLOURS["blue"]
    assert image.getpixel((SIDE - 14, 14)) not in COLOURS.values()


def test_rows_have_the_fields_of_clevr_cogent_and_repeat_by_seed() -> None:
    rows, again, other = (synthetic_rows("train", seed=seed, size=40) for seed in (3, 3, 4))
    assert all(set(row) == {"image", "problem", "solution"} for row in rows)
    assert [(r["problem"], r["solution"], r["image"].tobytes()) for r in rows] == [
        (r["problem"], r["solution"], r["image"].tobytes()) for r in again
    ]
    assert [r["problem"] for r in rows] != [r["problem"] for r in other]


def test_a_picture_carries_one_question_of_every_kind() -> None:
    per_picture = Counter(id(row["image"]) for row in synthetic_rows("train", seed=0, size=100))
    assert set(per_picture.values()) == {len(ANSWERS)}


def test_the_text_alone_is_worth_little() -> None:
    assert chance_accuracy() <= 0.33
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    rows = synthetic_rows("train", seed=0, size=5000)
    for row in rows:
        answers[row["problem"]][row["solution"]] += 1
    best_guess = sum(max(counts.values()) for counts in answers.values()) / len(rows)
    assert best_guess <= chance_accuracy() + 0.02


def test_splits_share_no_layout() -> None:
    layouts = {}
    for split in ("train", "val"):
        stream = scenes(split, random.Random(0))
        made = [next(stream) for _ in range(300)]
        assert all(split_of(scene) == split for scene in made)
        layouts[split] = {content_of(scene) for scene in made}
        assert len(layouts[split]) == 300
    assert not layouts["train"] & layouts["val"]


def test_load_rows_gives_prompt_rows() -> None:
    rows = load_rows("synthetic-clevr", "val", seed=1, size=20)
    assert len(rows) == 20
    assert len({row.prompt_id for row in rows}) == 20
    known = {answer for answers in ANSWERS.values() for answer in answers}
    for row in rows:
        assert row.answer in known
        assert "<think>" in row.text and "<answer>" in row.text and "{}" not in row.text
        assert Image.open(io.BytesIO(row.images[0])).size == (SIDE, SIDE)
    assert rows[-1] == rows[19] and list(rows[2:4]) == [rows[2], rows[3]]
    with pytest.raises(IndexError):
        rows[20]


def test_hub_shaped_rows_take_the_same_path() -> None:
    picture = Image.new("L", (30, 20), 7)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG")
    raw = [
        {"image": picture, "problem": "How many {cubes}?", "solution": "<answer> 3 </answer>"},
        {"image": png(picture), "problem": "Any?", "solution": "yes"},
        {
            "image": {"bytes": jpeg.getvalue(), "path": None},
            "problem": "Any?",
            "solution": "<answer>no</answer>",
        },
    ]
    rows = ClevrRows(raw, prefix="clevr-cogent/valA/0", prompt=GENERIC_PROMPT, task="clevr-cogent")
    assert [row.answer for row in rows] == ["3", "yes", "no"]
    assert rows[0].text.startswith("How many {cubes}?\n")
    assert rows[0].prompt_id == "clevr-cogent/valA/0/000000"
    assert all(row.images[0].startswith(b"\x89PNG") for row in rows)
    assert rows[1].images[0] == raw[1]["image"]  # PNG bytes stay as they are


@pytest.mark.parametrize("image", [b"not a picture", 5, {"path": "x.png", "bytes": None}])
def test_a_row_without_a_picture_is_refused(image: object) -> None:
    rows = ClevrRows([{"image": image, "problem": "?", "solution": "1"}], prefix="p", prompt="{}", task="t")
    with pytest.raises(OmnifleetError):
        rows[0]


@pytest.mark.parametrize(
    ("name", "split", "size", "said"),
    [
        ("synthetic-clever", "train", 1, "synthetic-clevr"),
        ("synthetic-clevr", "test", 1, "val"),
        ("clevr-cogent", "test", 1, "valA"),
        ("synthetic-clevr", "val", 0, "at least 1"),
    ],
)
def test_bad_names_are_refused_and_say_what_is_known(name: str, split: str, size: int, said: str) -> None:
    with pytest.raises(OmnifleetError, match=said) as refused:
        load_rows(name, split, seed=0, size=size)
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert not refused.value.retryable


def test_controls_take_the_pictures_away() -> None:
    rows = load_rows("synthetic-clevr", "val", seed=0, size=30)
    blank, shuffled = blank_pictures(rows), shuffle_pictures(rows)
    assert len({row.images for row in blank}) == 1
    assert all(a.images != b.images for a, b in zip(rows, shuffled, strict=True))
    assert {row.images for row in rows} == {row.images for row in shuffled}
    for control in (blank, shuffled):
        assert [(r.prompt_id, r.text, r.answer) for r in control] == [
            (r.prompt_id, r.text, r.answer) for r in rows
        ]


def test_bare_answer_strips_tags_once() -> None:
    assert bare_answer("<answer> yes </answer>") == "yes"
    assert bare_answer(" 12 ") == "12"
