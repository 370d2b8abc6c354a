"""The live table: early rows say what is awaited, and hold no number that nobody measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omnifleet.cli.awaited import in_words
from omnifleet.cli.fleet import workers_table
from omnifleet.cli.status import ends_table, services_table, show_status
from omnifleet.cli.watch import COLUMNS, _Lives, metrics_table
from omnifleet.client.fleet import FleetView, WorkerView
from omnifleet.config import load_recipe
from omnifleet.config.load import dump_recipe
from omnifleet.types import WeightVersion, WorkerState

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


def lines(*rows: dict[str, Any], width: int = 160) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(metrics_table(list(rows), width))
    return [line for line in captured.get().splitlines() if line.strip()]


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_before_the_first_step_there_are_only_the_columns_that_have_a_number() -> None:
    shown = lines(BEFORE)
    assert cells(shown[0]) == ["step", "held out", "refit ms", "gate ms"]
    assert cells(shown[2]) == ["0", "0.528", "123", "85"]


def test_what_a_step_does_not_have_is_a_dot_and_no_number() -> None:
    shown = lines(BEFORE, STEP)
    titles = cells(shown[0])
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
    before, step = (dict(zip(titles, cells(line), strict=True)) for line in shown[2:4])
    assert before["reward"] == before["lag"] == before["in flight"] == "·"
    assert step["held out"] == "·" and step["lag"] == "0.00" and step["in flight"] == "3"
    assert "not measured in this step" in " ".join(shown) and "gen KL" not in " ".join(shown)


@pytest.mark.parametrize("width", [160, 100, 80, 60, 30])
def test_in_any_width_numbers_are_whole_or_their_column_is_not_there(width: int) -> None:
    full = {key: 12345.6789 for _, key, _ in COLUMNS} | {"step": 120, "gen_kl_error": 1.2e-5, "reward": 0.5}
    shown = lines(full, {**full, "tokens_per_s": 1.0}, width=width)
    assert max(map(len, shown)) <= width and "…" not in "".join(shown)
    row = next(line.split() for line in shown if line.split()[0] == "120")
    assert row == [form.format(full[key]) for _, key, form in COLUMNS][: len(row)]
    assert width < 100 or len(row) == len(COLUMNS)


def test_a_usual_step_has_all_its_columns_in_80() -> None:
    usual = {key: 123.4 for _, key, _ in COLUMNS}
    usual |= {"step": 120, "reward": 0.5, "heldout_reward": 0.5, "tmpe": 1.0003, "gen_kl_error": 1.2e-5}
    usual |= {"approx_entropy": 0.94, "lag_mean": 0.93, "tokens_per_s": 12301.0, "step_s": 12.3}
    assert any(len(line.split()) == len(COLUMNS) and "120" in line for line in lines(usual, width=80))


def test_status_and_fleet_fit_into_80_columns_and_say_all() -> None:
    silent = "unavailable: failed to connect to all addresses; last error: UNKNOWN: connection refused"
    services: list[dict[str, Any]] = [
        {"name": "media", "state": "serving", "uptime_s": 9999, "grpc": "10.128.17.211:33011", "http": "h:1"},
        {"name": "gateway", "state": silent, "grpc": "10.128.17.211:33012", "http": "10.128.17.211:35895"},
    ]
    at = WeightVersion("cpu-tiny", "a81a39d9", 24, "f")
    note = f"at {at}, needs cpu-tiny/a81a39d9:25"
    workers = [
        WorkerView("worker-12-5e7d65", state=WorkerState.CATCHING_UP, version=at, note=note, pinned=True),
        WorkerView("omnifleet-worker-7c9d8b6f5-abcde-5e7d65", state=WorkerState.READY, version=at),
    ]
    ends = {"ends": [{"name": "trainer", "pid": 4, "why": f"was killed by SIGKILL: {silent}", "unix": 1.0}]}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(services_table(services, {}))
        console.print(workers_table(FleetView(workers, 2, at, 1)))
        console.print(ends_table(ends))
    text = captured.get()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    said = " ".join(text.split())
    for whole in (
        "10.128.17.211:33012",
        "no answer",
        "worker-12-5e7d65",
        "catching_up, pinned",
        note,
        "SIGKILL",
    ):
        assert whole in said
    assert "last error: UNKNOWN: connection refused" in said


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


def test_the_status_of_a_run_that_is_down_shows_no_process_as_starting(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(RECIPE))
    left = [{"name": "worker-0", "pid": 2**22 + 1, "state": "running", "restarts": 0, "since_s": 3.0}]
    (tmp_path / "supervisor.json").write_text(json.dumps({"pid": 2**22 + 1, "processes": left}))
    console = Console(width=80)
    with console.capture() as captured:
        show_status(tmp_path, console, as_json=False)
    said = captured.get()
    assert ": down" in said and "no service is up; `omnifleet train" in said and "starting" not in said
