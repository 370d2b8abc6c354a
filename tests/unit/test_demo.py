"""`omnifleet demo` from its first line to its exit status; and, in the soak, a short one through the real services."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from omnifleet.cli import demo
from omnifleet.cli.control import control_dir
from omnifleet.cli.demo_report import write_demo_report
from omnifleet.cli.main import app
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.plan import prepare_run
from omnifleet.report.lives import Life, write_lives
from omnifleet.service import process_lives

STEPS = 20
TRAINER = load_recipe("cpu-tiny").trainer
SAMPLES = STEPS * TRAINER.prompts_per_step * TRAINER.generations_per_prompt
LIVES = [
    Life(
        "media",
        "m",
        1.0,
        {
            **dict.fromkeys(("objects", "decodes", "segments_computed", "shm_maps"), 9.0),
            "bytes_streamed": 0.0,
        },
    ),
    Life("worker-0", "w", 2.0, {"pictures_sent": 7.0, "encoder_items": 7.0}),
]


def write_run(run_dir: Path, *, tmpe: float = 1.001, lost: int = 0) -> None:
    """A demo's folder after a good run, but for what is asked. tmpe: in step 7; lost: samples that nobody trained."""
    rows: list[dict[str, Any]] = [{"step": 0, "heldout_reward": 0.5}]
    rows += [{"step": i, "reward": 0.7, "tmpe": 1.001} for i in range(1, STEPS + 1)]
    rows[7] |= {"tmpe": tmpe, "token_mult_prob_error_lag0": tmpe}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "steps": STEPS,
        "heldout_start": 0.5,
        "heldout_end": 0.8,
        "controls": {"blank": 0.4, "shuffled": 0.4},
        "refits": STEPS + 1,
        "refits_with_requests_in_flight": 9,
        "ledger": {"consumed": SAMPLES - lost, "consumed_twice": 0},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    write_lives(run_dir, LIVES)
    control_dir(run_dir).mkdir()
    still = {"heldout_start": 0.5, "heldout_end": 0.5, "steps": 4}
    (control_dir(run_dir) / "summary.json").write_text(json.dumps(still))


@pytest.fixture
def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, where training is the writing of a made-up run."""
    stopped: list[Path] = []
    monkeypatch.setattr(demo, "resolve_model", lambda name, overrides: load_recipe(name, [*overrides]))
    monkeypatch.setattr(demo, "start_services", prepare_run)
    monkeypatch.setattr(demo, "stop_services", stopped.append)
    monkeypatch.setattr(demo, "keep_counters", lambda run_dir: [])
    monkeypatch.setattr(demo, "_control", lambda run_dir, recipe: None)

    def run(**faults: Any) -> Result:
        monkeypatch.setattr(demo, "_train", lambda run_dir, recipe: write_run(run_dir, **faults))
        result = CliRunner().invoke(app, ["demo", "--steps", str(STEPS), "--runs", str(tmp_path)])
        assert stopped == [tmp_path / "demo-0"] * 2, "before the first step, and at the end"
        return result

    return run


def test_a_good_demo_says_what_holds_and_where_to_look(run_demo: Any, tmp_path: Path) -> None:
    result = run_demo()
    assert result.exit_code == 0, result.output
    assert [line[:5] for line in result.stdout.splitlines() if line.startswith("[")] == [
        f"[{i}/5]" for i in range(1, 6)
    ]
    checks = json.loads((tmp_path / "demo-0" / "checks.json").read_text())
    assert len(checks) == 9 and all(check["ok"] for check in checks)
    for check in checks:
        assert f"  holds  {check['claim']}: {check['evidence']}\n" in result.stdout
    assert f"report: {tmp_path}/demo-0/report.html" in result.stdout
    assert (tmp_path / "demo-0" / "curves.png").stat().st_size > 0


def test_a_claim_that_fails_names_its_step_and_cause_and_is_the_exit_status(
    run_demo: Any, tmp_path: Path
) -> None:
    result = run_demo(tmpe=1.3)
    assert result.exit_code == demo.CLAIM_EXIT == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("  FAILS"))
    assert "rollout and trainer agree on logprobs" in line
    assert f"highest 1.30000, step 7 of {STEPS}" in line and line.endswith("numbers differ")
    assert result.stdout.count("  holds  ") == 8
    assert "numbers differ" in (tmp_path / "demo-0" / "report.html").read_text()


def test_a_sample_that_the_ledger_lacks_is_counted(tmp_path: Path) -> None:
    recipe = load_recipe("cpu-tiny", [f"trainer.steps={STEPS}", f"run.root={tmp_path}"])
    write_run(prepare_run(recipe), lost=1)
    report = write_demo_report(recipe.run_dir, recipe, 1.0)
    assert (
        report.failing == 1 and f"{SAMPLES - 1} consumed = {STEPS} steps x {SAMPLES // STEPS}" in report.text
    )


@pytest.mark.usefixtures("run_demo")
def test_a_trainer_that_fails_ends_the_demo_and_its_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Path] = []
    monkeypatch.setattr(demo, "stop_services", stopped.append)
    monkeypatch.setattr(demo, "want", lambda run_dir, train: None)
    monkeypatch.setattr(demo, "watch_training", lambda *_, **__: False)
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--runs", str(tmp_path)])
    assert isinstance(result.exception, OmnifleetError) and result.exception.reason is Reason.INTERNAL
    assert result.exception.knob.endswith("demo-0/logs/trainer.log") and len(stopped) == 2


def test_the_demo_says_what_its_warm_start_took_and_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"seconds": 61.2, "greedy": 0.53, "sampled": 0.37, "see_steps": 100, "answer_steps": 23}
    (tmp_path / "warmstart.json").write_text(json.dumps(told))
    demo._say_warm_start(tmp_path, since=math.inf)
    said = " ".join(capsys.readouterr().out.split())
    assert "123 supervised steps in 61 s, held-out reward 0.53 greedy, 0.37 sampled" in said


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_a_demo_of_two_steps_claims_what_two_steps_can_show(tmp_path: Path) -> None:
    """Model, services, engines, control and report are those of `make demo`. Too short for its climb and its 20 refits."""
    command = [sys.executable, "-m", "omnifleet", "demo", "--steps", "2", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert done.returncode == demo.CLAIM_EXIT, done.stdout + done.stderr
    run_dir = tmp_path / "demo-0"
    claims = {check["claim"]: check["ok"] for check in json.loads((run_dir / "checks.json").read_text())}
    short = [claim for claim, ok in claims.items() if not ok]
    assert len(claims) == 9
    assert [claim.partition(":")[0].partition(" by ")[0] for claim in short] == [
        "held-out reward rises",
        "weights went back while work went on",
    ], done.stdout
    assert done.stdout.count("  holds  ") == 7 and done.stdout.count("  FAILS  ") == 2
    for said in ("held-out reward", "[4/5] control", "report: ", "step 2  reward "):
        assert said in done.stdout
    assert b"<html" in (run_dir / "report.html").read_bytes()
    state = json.loads((run_dir / "supervisor.json").read_text())
    assert not [p for p in (state["pid"], *(q["pid"] for q in state["processes"])) if process_lives(p)]
