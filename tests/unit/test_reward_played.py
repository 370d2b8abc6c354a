"""Tasks that an environment plays, from the row on disk over the prompt to a reward worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.environments.circle_click import CLICK, CircleClick
from omnifleet.config.recipe import ScorerConfig, SplitConfig
from omnifleet.environments import Answered, Scored, Task, rehearse
from omnifleet.environments.ask_once import AskOnce
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply
from omnifleet_trainer.data import PromptRow, load_split
from omnifleet_trainer.data.gym_convert import Counts, Rules, convert

CLIP = MediaRef(MediaKind.VIDEO, Digest("cd" * 32))
SOUND = MediaRef(MediaKind.AUDIO, Digest("ef" * 32))


def asked(row: PromptRow, media: MediaRef, reply: str) -> tuple[str, list[dict[str, Any]]]:
    """What the recipe's scorers judge of a reply, and the conversation that led to it."""
    task = Task(row.prompt_id, row.text, row.answer, extra=dict(row.extra), media=(media,))
    outcome, messages = rehearse(AskOnce(), task, [reply])
    assert isinstance(outcome, Answered)
    return outcome.text, messages


def score(row: PromptRow, text: str, *scorers: tuple[str, float]) -> float:
    """The weighted reward of a text for a row."""
    built = Registry().reward([ScorerConfig(name=name, weight=weight) for name, weight in scorers])
    reply = Reply(text, row.answer, row.text, extra=row.extra)
    return built.total(
        [term.scorer.judge(reply, term.params) for term in built.terms if term.scorer.judge]
    ).score


def test_gym_video(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"a clip")
    plain = {"prompt": "What moves? (A) a cat (B) a dog", "video": str(clip), "answer": "B"}
    (line,) = convert([json.dumps(plain)], Rules(system_prompt="Look."), Counts())
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = load_split(SplitConfig(dataset="gym-video", path=tmp_path), seed=0)
    for reply, reward in (
        ("so</think> \\boxed{B}", 1.0),
        ("so</think> \\boxed{B: a dog}", 1.0),
        ("\\boxed{B} no, \\boxed{A}", 0.0),  # the last box
        ("\\boxed{a dog}", 0.0),  # option text is no letter
        ("B", 0.0),
    ):
        text, messages = asked(row, CLIP, reply)
        assert messages[0] == {"role": "system", "content": "Look."}
        video, question = messages[1]["content"]
        assert video == {"type": "video_url", "video_url": {"url": CLIP.url}}
        assert question["text"] == row.text and row.text.startswith("What moves?")
        assert score(row, text, ("mcqa", 1.0)) == reward


def test_avqa(tmp_path: Path) -> None:
    question = "What barks?\nChoices:\nA. a dog\nB. a cat"
    rows = [{"audio": {"bytes": b"RIFF", "path": "a.wav"}, "question": question, "answer": "A"}]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "train-0.parquet")
    (row,) = load_split(SplitConfig(dataset="avqa", path=tmp_path), seed=0)
    for reply, reward in (
        ("<think>x</think><answer>A dog.</answer>", 1.0),
        ("x</think><answer>a dog</answer>", 0.95),  # 0.2·0.75 + 0.8: the template opened the tag
        ("<think>x</think><answer>a cat</answer>", 0.2),
        ("a dog", 0.0),
    ):
        text, messages = asked(row, SOUND, reply)
        sound, prompt = messages[0]["content"]
        assert sound["type"] == "audio_url" and question in prompt["text"]
        assert score(row, text, ("format", 0.2), ("exact_alnum", 0.8)) == pytest.approx(reward)


def test_circle_click() -> None:
    gym = CircleClick(size=1000)
    task = gym.tasks("train", 8, 0)[7]
    x, y, radius = task.extra["circle"]
    inside = int(radius * 0.6), int(radius * 0.8)  # 3-4-5: not beyond the rim
    for arguments, reward in (
        ({"x": x, "y": y}, 1.0),
        ({"x": x + radius, "y": y}, 1.0),  # on the rim
        ({"x": x + inside[0], "y": y - inside[1]}, 1.0),
        ({"x": x + radius + 1, "y": y}, 0.0),
        ({"x": float(x), "y": y}, 0.0),  # the tool asks for whole pixels
    ):
        outcome, messages = rehearse(gym, task, [{"name": "click", "arguments": arguments}])
        assert outcome == Scored(reward, {"called": 1.0 if isinstance(arguments["x"], int) else 0.0})
        picture, text = messages[0]["content"]
        assert picture["type"] == "image_url" and text["text"] == task.text
    outcome, _ = rehearse(gym, task, ["I would rather not"])
    assert outcome == Scored(0.0, {"called": 0.0}) and CLICK["function"]["name"] == "click"
