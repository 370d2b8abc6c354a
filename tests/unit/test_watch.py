"""The live table: early rows say what is awaited, and hold no number that nobody measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omnifleet.cli.awaited import in_words
from omnifleet.cli.watch import _Lives, metrics_table
from omnifleet.config import load_recipe

RECIPE = load_recipe("cpu-tiny")
NEED = RECIPE.trainer.prompts_per_step
BEFORE = {"step": 0, "heldout_reward": 0.528, "refit_ms": 123.4, "gate_ms": 84.8, "refit_in_flight": 0.0}
STEP = {
    "step": 1,
    "reward": 0.51,
    "tmpe": 1.0003,
    "lag_mean": 0.0,
    "tokens_per_s": 301.0,
    "refit_in_flight": 3.0,
}


def lines(*rows: dict[str, Any]) -> list[str]:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(metrics_table(list(rows)))
    return [line for line in captured.get().splitlines() if line.strip()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]


def test_before_the_first_step_there_are_only_the_columns_that_have_a_number() -> None:
    shown = lines(BEFORE)
    assert cells(shown[1]) == ["step", "held out", "refit ms", "gate ms"]
    assert cells(shown[3]) == ["0", "0.528", "123", "85"]


def test_what_a_step_does_not_have_is_a_dot_and_no_number() -> None:
    shown = lines(BEFORE, STEP)
    titles = cells(shown[1])
    assert titles == [
        "step",
        "reward",
        "held out",
        "TMPE",
        "lag",
        "tok/s",
        "refit ms",
        "gate ms",
        "in flight",
    ]
    before, step = (dict(zip(titles, cells(line), strict=True)) for line in shown[3:5])
    assert before["reward"] == before["lag"] == before["in flight"] == "·"
    assert step["held out"] == "·" and step["lag"] == "0.00" and step["in flight"] == "3"
    assert "not measured in this step" in " ".join(shown)


def trainer(state: str, doing: str = "", **counters: float) -> dict[str, Any]:
    return {"state": state, "facts": {"step": "2", "doing": doing}, "counters": counters}


@pytest.mark.parametrize(
    ("status", "process", "words"),
    [
        ({"state": "down"}, {}, "about to start"),
        ({"state": "down"}, {"since_s": 12.0}, f"loads {RECIPE.model.path} (12.0 s)"),
        (trainer("starting"), {}, "about to send the first weights"),
        (trainer("starting", "step 0: scoring held-out prompts"), {}, "step 0: scoring held-out prompts"),
        (
            trainer("training", "step 3: waiting for replies", groups_waiting=5, groups_running=9),
            {},
            f"step 3: waiting for replies, 5 of {NEED} groups ready, 9 being written",
        ),
        (trainer("training", "step 3: training", groups_waiting=5), {}, "step 3: training"),
        (trainer("paused"), {}, "paused by an operator after step 2"),
        (trainer("stopping", "step 3: training"), {}, "then a checkpoint"),
        (trainer("finishing", "step 2: writing the last checkpoint"), {}, "writing the last checkpoint"),
        (trainer("ended"), {}, "the trainer ends"),
        ({"state": "unavailable: connection refused"}, {"since_s": 3}, "does not answer"),
    ],
)
def test_what_a_run_does_now_in_words(status: dict[str, Any], process: dict[str, Any], words: str) -> None:
    assert words in in_words(status, process, RECIPE)


def test_a_resume_is_told_once_and_a_fresh_start_not(tmp_path: Path) -> None:
    console, start = Console(width=80), tmp_path / "start.json"
    start.write_text(json.dumps({"unix": 1.0, "lineage": "a", "resumed": "resumed from step 2"}))
    lives = _Lives(tmp_path, console)
    with console.capture() as captured:
        lives.tell()  # began before we watched
        start.write_text(
            json.dumps({"unix": 1.0, "lineage": "b", "resumed": "resumed from step 24; 8 prompts"})
        )
        lives.tell()
        lives.tell()
        start.write_text(json.dumps({"unix": 9.0, "lineage": "c", "resumed": ""}))
        lives.tell()
    assert captured.get() == "resumed from step 24; 8 prompts\n"
