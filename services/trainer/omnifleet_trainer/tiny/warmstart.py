"""The warm start: a short supervised phase after which the tiny model answers in format, and only middling well.

Three lessons, each ended by a measurement on held-out scenes, a step count or the compute budget:
1. *see*: the vision tower learns to name what is in each cell of the grid; it is frozen from there on;
2. *answer*: the language side learns the right answers in ``<think></think><answer>X</answer>`` format;
3. *careless*: it copies a teacher who often says a fixed neighbour of the right answer, above all for counts and
   colours. So the model could answer better than it does; that is what the reinforcement phase has to find.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from omnifleet_trainer.tiny.scenes import (
    ANSWERS,
    COLOURS,
    GRID,
    PROMPT,
    SHAPES,
    draw,
    scenes,
    synthetic_rows,
)

CELLS = GRID * GRID
IGNORED = -100
THREADS = 2  # more only slows matrices this small, and the budget is meant for two cores
# kind -> (share of right answers, share of the neighbour); the rest is a random answer of the kind
CARELESS: dict[str, tuple[float, float]] = {
    "count": (0.40, 0.50),
    "colour": (0.35, 0.55),
    "shape": (0.50, 0.40),
    "exists": (0.55, 0.35),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Lessons:
    """Settings of the warm start. ``cpu_seconds`` caps the compute of all threads; about 100 are needed."""

    see_steps: int = 80
    answer_steps: int = 400
    careless_steps: int = 150
    skill: float = 0.90  # lesson 2 ends when greedy decoding earns this much
    middling: float = 0.53  # lesson 3 ends when greedy and sampled answers earn at most this much
    pictures: int = 2000
    batch: int = 64
    held_out: int = 250
    adam_lr: float = 2e-3  # vision tower, embeddings, head, norms
    muon_lr: float = 2e-2  # matrices of the language layers
    cpu_seconds: float = 300.0


@dataclass(frozen=True)
class WarmStartReport:
    """What the warm start took and reached; scores are mean held-out rewards in [0, 1]."""

    seconds: float
    cpu_seconds: float
    see_steps: int
    answer_steps: int
    careless_steps: int
    skill: float  # greedy score before the careless teacher
    greedy: float
    sampled: float  # at temperature 1

    def as_dict(self) -> dict[str, float]:
        """Plain numbers for JSON."""
        return asdict(self)


def answer_score(text: str, answer: str) -> float:
    """0.2 format + 0.8 exact match, the reward service's ``format`` and ``exact_alnum`` on one reply, in [0, 1]."""
    think = re.search(r"<think>.*?</think>", text, re.DOTALL) is not None
    found = re.search(r"<answer>(.*)</answer>", text, re.DOTALL)
    exact = found is not None and _alnum(found[1]) == _alnum(answer)
    return 0.2 * (0.25 * think + 0.75 * (found is not None)) + 0.8 * exact


def answer_of(row: Row) -> str:
    """The bare answer of a row's ``solution``."""
    return re.sub(r"</?answer>", "", row["solution"]).strip()


def careless_answer(answer: str, rng: random.Random) -> str:
    """What the careless teacher says in place of ``answer``: it, its neighbour in the kind's order, or anything."""
    kind = next(kind for kind, answers in ANSWERS.items() if answer in answers)
    answers = ANSWERS[kind]
    right, neighbour = CARELESS[kind]
    draw_ = rng.random()
    if draw_ < right:
        return answer
    if draw_ < right + neighbour:
        return answers[(answers.index(answer) + 1) % len(answers)]
    return rng.choice(answers)


def warm_start(folder: Path, *, seed: int = 0, lessons: Lessons | None = None) -> WarmStartReport:
    """Train the checkpoint in ``folder`` in place (float32, CPU) and print and return the report.

    Raises OSError where ``folder`` holds no checkpoint.
    """
    lessons = lessons or Lessons()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, THREADS))
    with torch.random.fork_rng(), Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        torch.manual_seed(seed)
        try:
            report = _Course(folder, seed, lessons, progress).run()
        finally:
            torch.set_num_threads(threads)
    console.print(
        f"warm start: {report.seconds:.0f} s, held-out reward {report.greedy:.2f} greedy, "
        f"{report.sampled:.2f} sampled ({report.skill:.2f} before the careless teacher)"
    )
    return report


class Pupil:
    """The model with its processor: pictures in, vision tokens out; questions and vision tokens in, loss out."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.image_token = self.model.config.image_token_id
        self.known: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def prompt(self, problem: str) -> str:
        """The chat text of one question, its picture a single image token."""
        content = [{"type": "image"}, {"type": "text", "text": PROMPT.format(problem)}]
        chat = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def see(self, images: Sequence[Image.Image]) -> Tensor:
        """Vision tokens, float32 [pictures, CELLS, hidden]: one for each cell of the grid."""
        pixels = self.processor.image_processor(images=list(images), return_tensors="pt")
        seen: Tensor = self.model.model.visual(pixels["pixel_values"], pixels["image_grid_thw"]).pooler_output
        return seen.view(len(images), CELLS, -1)

    def read(self, problem: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a prompt (image token repeated for each cell) and of the reply that answers it."""
        if (problem, answer) in self.known:
            return self.known[problem, answer]
        tokenizer = self.processor.tokenizer
        pad = tokenizer.decode([self.image_token])
        prompt = self.prompt(problem).replace(pad, pad * CELLS)
        reply = f"<think></think><answer>{answer}</answer>{tokenizer.eos_token}"
        self.known[problem, answer] = tokenizer(prompt)["input_ids"], tokenizer(reply)["input_ids"]
        return self.known[problem, answer]

    def loss(self, texts: Sequence[tuple[list[int], list[int]]], seen: Tensor) -> Tensor:
        """Mean cross entropy of the replies' tokens, given ``seen`` float32 [rows, CELLS, hidden]."""
        width = max(len(prompt) + len(reply) for prompt, reply in texts)
        ids = torch.full((len(texts), width), self.processor.tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for row, (prompt, reply) in enumerate(texts):
            ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        language = self.model.model.language_model
        is_image = ids == self.image_token
        embeds = language.embed_tokens(ids).masked_scatter(is_image[..., None], seen)
        # all prompts begin alike up to the picture, so the positions of one row are those of all
        grid = torch.tensor([[1, 2 * GRID, 2 * GRID]])
        positions, _ = self.model.model.get_rope_index(ids[:1], is_image[:1].int(), grid)
        hidden = language(
            inputs_embeds=embeds, position_ids=positions.expand(3, *ids.shape)
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def score(self, rows: Sequence[Row], *, greedy: bool) -> float:
        """Mean reward of the model's own replies to rows, greedy or sampled at temperature 1."""
        batch = self.processor(
            text=[self.prompt(row["problem"]) for row in rows],
            images=[row["image"] for row in rows],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        sampling = (
            {"do_sample": False}
            if greedy
            else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        out = self.model.generate(**batch, max_new_tokens=8, **sampling)
        replies = self.processor.tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return sum(
            answer_score(reply, answer_of(row)) for reply, row in zip(replies, rows, strict=True)
        ) / len(rows)


class _Course:
    """One run of the three lessons."""

    def __init__(self, folder: Path, seed: int, lessons: Lessons, progress: Progress) -> None:
        self.started, self.cpu_started = time.monotonic(), time.process_time()
        self.folder, self.lessons, self.progress = folder, lessons, progress
        self.rng = random.Random(seed)
        self.seed = seed
        self.pupil = Pupil(folder)
        self.held_out = synthetic_rows("val", seed=seed, size=lessons.held_out)

    def run(self) -> WarmStartReport:
        see_steps = self._see()
        rows = synthetic_rows("train", seed=self.seed, size=len(ANSWERS) * self.lessons.pictures)
        pictures = {id(row["image"]): row["image"] for row in rows}
        place = {key: index for index, key in enumerate(pictures)}
        with torch.no_grad():
            self.seen = self.pupil.see(list(pictures.values()))
        self.rows, self.picture_of = rows, [place[id(row["image"])] for row in rows]
        self._prepare_optimizers()
        answer_steps = self._answer()
        skill = self.pupil.score(self.held_out, greedy=True)
        careless_steps = self._careless()
        self.pupil.model.save_pretrained(self.folder)
        return WarmStartReport(
            seconds=time.monotonic() - self.started,
            cpu_seconds=time.process_time() - self.cpu_started,
            see_steps=see_steps,
            answer_steps=answer_steps,
            careless_steps=careless_steps,
            skill=skill,
            greedy=self.pupil.score(self.held_out, greedy=True),
            sampled=self.pupil.score(self.held_out, greedy=False),
        )

    def _see(self) -> int:
        """Pull each cell's vision token towards the embeddings of the words that name its colour and shape."""
        words = self.pupil.processor.tokenizer
        embeddings = self.pupil.model.model.language_model.embed_tokens.weight.detach()
        nothing = "?"
        colours = embeddings[[words(word)["input_ids"][0] for word in (*(f" {c}" for c in COLOURS), nothing)]]
        shapes = embeddings[[words(word)["input_ids"][0] for word in (*(f" {s}" for s in SHAPES), nothing)]]
        vision = self.pupil.model.model.visual
        optimizer = torch.optim.AdamW(
            vision.parameters(), lr=self.lessons.adam_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        stream = scenes("train", self.rng)
        steps = self.lessons.see_steps
        bar = self.progress.add_task("warm start: see pictures", total=steps)
        for step in range(steps):
            batch = [next(stream) for _ in range(self.lessons.batch // 2)]
            colour = torch.full((len(batch), CELLS), len(COLOURS))
            shape = torch.full((len(batch), CELLS), len(SHAPES))
            for row, scene in enumerate(batch):
                for thing in scene:
                    colour[row, thing.cell] = list(COLOURS).index(thing.colour)
                    shape[row, thing.cell] = SHAPES.index(thing.shape)
            seen = self.pupil.see([draw(scene, self.rng) for scene in batch])
            loss = F.cross_entropy((seen @ colours.T).flatten(0, 1), colour.flatten())
            loss = loss + F.cross_entropy((seen @ shapes.T).flatten(0, 1), shape.flatten())
            _set_rate(optimizer, self.lessons.adam_lr * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            self.progress.advance(bar)
        vision.requires_grad_(False)
        return steps

    def _prepare_optimizers(self) -> None:
        """Muon for the matrices of the language layers (about twice as fast here as AdamW), AdamW for the rest."""
        named = [(name, p) for name, p in self.pupil.model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if p.ndim != 2 or ".layers." not in name]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=self.lessons.muon_lr, weight_decay=0.01), self.lessons.muon_lr),
            (torch.optim.AdamW(others, lr=self.lessons.adam_lr, betas=(0.9, 0.95)), self.lessons.adam_lr),
        ]

    def _answer(self) -> int:
        steps = self.lessons.answer_steps
        bar = self.progress.add_task("warm start: answer", total=steps)
        for step in range(steps):
            gone = max(step / steps, self._spent() / 0.75)
            if gone >= 1:
                return step
            self._step(
                [answer_of(row) for row in self._draw_rows()], min(1.0, (step + 1) / 20) * (1 - 0.9 * gone)
            )
            self.progress.advance(bar)
            measured = (step + 1) % 50 == 0 and gone > 0.5
            if measured and self.pupil.score(self.held_out, greedy=True) >= self.lessons.skill:
                return step + 1
        return steps

    def _careless(self) -> int:
        steps = self.lessons.careless_steps
        bar = self.progress.add_task("warm start: a careless teacher", total=steps)
        for step in range(steps):
            if self._spent() >= 1:
                return step
            self._step([careless_answer(answer_of(row), self.rng) for row in self._draw_rows()], 0.3)
            self.progress.advance(bar)
            if (step + 1) % 10 == 0 and self._middling():
                return step + 1
        return steps

    def _middling(self) -> bool:
        most = self.lessons.middling
        return (
            self.pupil.score(self.held_out, greedy=True) <= most
            and self.pupil.score(self.held_out, greedy=False) <= most
        )

    def _draw_rows(self) -> list[Row]:
        self.picked = self.rng.sample(range(len(self.rows)), self.lessons.batch)
        return [self.rows[index] for index in self.picked]

    def _step(self, answers: Sequence[str], rate: float) -> None:
        """One update on the picked rows with the teacher's answers, at ``rate`` times the base learning rates."""
        texts = [
            self.pupil.read(self.rows[i]["problem"], answer)
            for i, answer in zip(self.picked, answers, strict=True)
        ]
        loss = self.pupil.loss(texts, self.seen[[self.picture_of[index] for index in self.picked]])
        self.pupil.model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.pupil.model.parameters(), 1.0)
        for optimizer, base in self.optimizers:
            _set_rate(optimizer, base * rate)
            optimizer.step()

    def _spent(self) -> float:
        """Share of the compute budget that is gone."""
        return (time.process_time() - self.cpu_started) / self.lessons.cpu_seconds


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _alnum(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).lower()
