"""Synthetic scenes: a few coloured shapes on a 3x3 grid, and questions with balanced answers.

Rows have the fields of the clevr-cogent set (``image``, ``problem``, ``solution``). Which split a scene belongs to
follows from its content, so no layout is ever in two splits, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from omnifleet.errors import invalid

SHAPES = ("circle", "square", "triangle", "ring")
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 150, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 30),
    "purple": (140, 30, 160),
    "black": (15, 15, 15),
}
COUNTS = ("0", "1", "2", "3")
ANSWERS: dict[str, tuple[str, ...]] = {
    "count": COUNTS,
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "exists": ("yes", "no"),
}
SPLITS = ("train", "val")
PROMPT = "{} <think></think><answer></answer>"

GRID = 3
CELL = 28
SIDE = GRID * CELL
BACKGROUND = (200, 200, 200)


@dataclass(frozen=True, order=True)
class Thing:
    """One shape in one cell of the grid (row-major)."""

    cell: int
    shape: str
    colour: str


@dataclass(frozen=True)
class Question:
    """A question of one kind (a key of ``ANSWERS``) with the answer that its scene gives."""

    kind: str
    text: str
    answer: str


Scene = tuple[Thing, ...]


def chance_accuracy() -> float:
    """Best expected accuracy of a guesser that sees the questions but not the pictures: the mean of 1/answers."""
    return sum(1 / len(answers) for answers in ANSWERS.values()) / len(ANSWERS)


def content_of(scene: Scene) -> str:
    """The scene as text: equal layouts give equal strings; jitter and size of the drawing are no part of it."""
    return " ".join(f"{thing.cell}:{thing.colour}:{thing.shape}" for thing in sorted(scene))


def split_of(scene: Scene) -> str:
    """``val`` for one layout in four, chosen by the digest of its content, else ``train``."""
    return "val" if hashlib.sha256(content_of(scene).encode()).digest()[0] % 4 == 0 else "train"


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene as an RGB picture of SIDE x SIDE pixels; ``rng`` moves and sizes each shape a little."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for thing in scene:
        radius = rng.randint(9, 11)
        centre_x = thing.cell % GRID * CELL + CELL // 2 + rng.randint(-2, 2)
        centre_y = thing.cell // GRID * CELL + CELL // 2 + rng.randint(-2, 2)
        box = (centre_x - radius, centre_y - radius, centre_x + radius, centre_y + radius)
        colour = COLOURS[thing.colour]
        if thing.shape == "circle":
            pen.ellipse(box, fill=colour)
        elif thing.shape == "square":
            pen.rectangle(box, fill=colour)
        elif thing.shape == "triangle":
            pen.polygon([(box[0], box[3]), (box[2], box[3]), (centre_x, box[1])], fill=colour)
        else:
            pen.ellipse(box, outline=colour, width=5)
    return image


def questions_about(scene: Scene) -> list[Question]:
    """Every question that can be asked about a scene, each with its answer."""
    colours = Counter(thing.colour for thing in scene)
    shapes = Counter(thing.shape for thing in scene)
    present = {(thing.colour, thing.shape) for thing in scene}
    asked = [
        Question("count", f"How many {colour} things?", str(colours[colour]))
        for colour in COLOURS
        if colours[colour] < len(COUNTS)
    ]
    for thing in scene:
        if shapes[thing.shape] == 1:
            asked.append(Question("colour", f"What colour is the {thing.shape}?", thing.colour))
        if colours[thing.colour] == 1:
            asked.append(Question("shape", f"What shape is the {thing.colour} thing?", thing.shape))
    asked += [
        Question("exists", f"Is there a {colour} {shape}?", "yes" if (colour, shape) in present else "no")
        for colour in COLOURS
        for shape in SHAPES
    ]
    return asked


def synthetic_rows(split: str, *, seed: int, size: int) -> list[dict[str, Any]]:
    """Make ``size`` rows ``{image: PIL RGB, problem: str, solution: "<answer> X </answer>"}`` of a split.

    Each picture carries one question of every kind. Of the questions a scene allows, the (question, answer) pair
    asked least so far is taken: so the answers to every single question text are balanced, and the text alone is
    worth no more than ``chance_accuracy()``. Raises OmnifleetError on an unknown split or a size below 1.
    """
    if split not in SPLITS:
        raise invalid(f"unknown split {split!r} of the synthetic set; allowed: {', '.join(SPLITS)}")
    if size < 1:
        raise invalid(f"the synthetic set needs a size of at least 1, not {size}")
    rng = random.Random(f"{split}-{seed}")
    asked: Counter[tuple[str, str]] = Counter()
    rows: list[dict[str, Any]] = []
    for scene in scenes(split, rng):
        options = questions_about(scene)
        picks = [_least_asked([q for q in options if q.kind == kind], asked, rng) for kind in ANSWERS]
        image = draw(scene, rng)
        for pick in picks:
            rows.append(
                {"image": image, "problem": pick.text, "solution": f"<answer> {pick.answer} </answer>"}
            )
        if len(rows) >= size:
            break
    del rows[size:]
    rng.shuffle(rows)
    return rows


def scenes(split: str, rng: random.Random) -> Iterator[Scene]:
    """Distinct scenes of a split, each allowing a question of every kind."""
    seen: set[str] = set()
    while True:
        colours = rng.sample(list(COLOURS), rng.randint(2, 4))
        shapes = rng.sample(SHAPES, rng.randint(2, 3))
        cells = sorted(rng.sample(range(GRID * GRID), rng.randint(3, 5)))
        scene = tuple(Thing(cell, rng.choice(shapes), rng.choice(colours)) for cell in cells)
        kinds = {question.kind for question in questions_about(scene)}
        content = content_of(scene)
        if split_of(scene) == split and content not in seen and kinds == set(ANSWERS):
            seen.add(content)
            yield scene


def _least_asked(options: list[Question], asked: Counter[tuple[str, str]], rng: random.Random) -> Question:
    pick = min(options, key=lambda question: (asked[question.text, question.answer], rng.random()))
    asked[pick.text, pick.answer] += 1
    return pick
