"""A run goes on while its processes die and its fleet changes; the ledger says that nothing was lost or counted twice."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable

import pytest

from omnifleet.report.lives import read_lives
from omnifleet.report.records import read_run
from tests.support_run import CliRun, until

STEPS = 150
SAMPLES = 4 * 4


def assert_books_balance(run: CliRun, steps: int) -> None:
    ledger = run.summary()["ledger"]
    assert ledger["consumed"] == steps * SAMPLES
    assert ledger["consumed_twice"] == 0
    assert ledger["lost"] == 0
    assert [row["step"] for row in read_run(run.run_dir).steps] == list(range(steps + 1))


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_kills_of_every_service_and_scaling_while_training(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run(f"trainer.steps={STEPS}", "rollout.workers=1", engine="fake:0.06")
    run.train()
    run.wait_step(2)
    until(lambda: [*listed(run, wanted=1).values()] == ["ready"], 60, "one worker is listed")

    run.omnifleet("fleet", "scale", "3")
    until(lambda: sum(w["state"] == "ready" for w in run.workers()) == 3, 60, "three workers serve")
    serving = {w["id"]: w["version"] for w in run.workers()}
    assert all("base" not in version for version in serving.values()), serving
    until(lambda: listed(run, wanted=3) == dict.fromkeys(serving, "ready"), 60, "three workers are listed")

    run.kill("worker-0")
    seen = run.step()
    run.wait_step(seen + 3)
    until(lambda: sum(w["state"] == "ready" for w in run.workers()) == 3, 60, "another took its place")

    run.omnifleet("fleet", "drain", "worker-1")
    run.kill("trainer")
    run.wait_step(run.step() + 3)

    run.kill("media")
    run.wait_step(run.step() + 3)
    run.kill("gateway")
    run.wait_step(run.step() + 3)
    run.kill("reward")
    run.wait_step(run.step() + 3)

    run.omnifleet("fleet", "scale", "1")
    listed(run, wanted=1)
    until(lambda: len([w for w in run.workers() if w["state"] == "ready"]) == 1, 60, "one worker is left")
    assert run.finish(180) == 0
    assert_books_balance(run, STEPS)
    assert_no_sample_of_a_crash(run)
    assert_the_report_knows_who_ended(run)


def listed(run: CliRun, *, wanted: int) -> dict[str, str]:
    """What `omnifleet fleet list` shows: worker -> state."""
    said = run.omnifleet("fleet", "list")
    assert f"workers (wanted {wanted}, weights " in said, said
    return dict(re.findall(r"^ *(worker-\d+-\S+) +(\w+)\b.*%", said, re.MULTILINE))


def assert_the_report_knows_who_ended(run: CliRun) -> None:
    """Workers that were killed or drained are told with their end, and what a killed service had counted is added."""
    lives = read_lives(run.run_dir)
    ended = {life.who: life.ended.partition(":")[0] for life in lives if life.ended}
    assert ended["worker-0"] == "dead" and ended["worker-1"] == "retired", lives
    media = [life.ended for life in lives if life.who == "media"]
    assert len(media) == 2 and media[0].startswith("was killed by SIGKILL"), lives
    page = (run.run_dir / "report.html").read_text()
    assert "Workers that are gone" in page and "2 processes, one after the other" in page


def assert_no_sample_of_a_crash(run: CliRun) -> None:
    """An attempt that ended by an infrastructure failure has an outcome of its own and no trajectory."""
    with sqlite3.connect(run.run_dir / "ledger.sqlite") as ledger:
        tables = {row[0] for row in ledger.execute("select name from sqlite_master where type = 'table'")}
        assert {"attempts", "trajectories"} <= tables
        rows = ledger.execute(
            "select count(*) from trajectories t join attempts a on a.id = t.group_id where a.outcome not in ('scored', 'stale')"
        ).fetchone()
    assert rows[0] == 0


@pytest.mark.heavy
def test_ctrl_c_then_the_same_command_resumes(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run("trainer.steps=12", engine="fake:0.03")
    run.train()
    run.wait_step(4)
    assert run.process is not None
    run.process.terminate()
    assert run.finish(60) == 130
    stopped = run.step()
    assert 4 <= stopped < 12
    run.train()
    assert run.finish(120) == 0
    assert re.search(r"^resumed from step \d+", run.said, re.MULTILINE), run.said
    assert_books_balance(run, 12)
    assert len([life for life in read_lives(run.run_dir) if life.who == "gateway"]) == 2
    lineages = {row["lineage"] for row in read_run(run.run_dir).steps}
    assert len(lineages) == 2, "a resume starts a new lineage"


@pytest.mark.heavy
def test_errors_are_one_clear_line(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run()
    out = run.omnifleet("train", "cpu-tiny", "trainer.stepz=1", check=False)
    assert out.strip().startswith("omnifleet: invalid_config") and "did you mean 'steps'" in out
    out = run.omnifleet("train", "cpu-tiny", "model.path=/nowhere", check=False)
    assert "model_missing" in out and "/nowhere" in out and "Traceback" not in out
    run.train("media.listen=203.0.113.1:1")
    assert run.process is not None
    out, _ = run.process.communicate(timeout=60)
    assert "port_taken" in out and "media.listen" in out and "Traceback" not in out, out
    assert json.loads((run.run_dir / "supervisor.json").read_text())["state"] == "failed"
