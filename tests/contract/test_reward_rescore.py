"""`omnifleet reward rescore`: a run's ledger is scored again with another reward, and the difference told."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omnifleet_reward.cli import app
from omnifleet_trainer.ledger import SqliteLedger
from tests.unit.ledger_samples import group_of

REWARD = """
reward:
  - {name: exact_text, params: {places: [text]}}
reward_service: {item_timeout_s: 60}
"""
REPLIES = (("yes", 1.0), ("Yes", 0.0), ("no", 0.0), ("<answer>yes</answer>", 0.5))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one group of four replies and their recorded rewards."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(REWARD)
    ledger = SqliteLedger(folder / "ledger.sqlite", owner="test")
    ledger.roll_back_to(0, "first")
    ledger.add_epoch(0, ["p"])
    (lease,) = ledger.lease_next(1, version=0, ttl_s=60)
    group = group_of(lease, samples=len(REPLIES))
    group.trajectories = [
        replace(trajectory, text=text, reward=reward)
        for trajectory, (text, reward) in zip(group.trajectories, REPLIES, strict=True)
    ]
    ledger.record_group(lease, group)
    ledger.close()
    return folder


def rescore(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["rescore", *arguments])


def test_changes_are_shown_and_reported(run_dir: Path, tmp_path: Path) -> None:
    before = (run_dir / "ledger.sqlite").read_bytes()
    report = tmp_path / "report.csv"
    done = rescore(
        str(run_dir), "--scorer", "exact_alnum@1", "--scorer", "exact_text=3",
        "--param", "exact_text.places=[text]", "--param", "exact_text.ignore_case=true", "--out", str(report),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    # 3/4 exact_text + 1/4 exact_alnum: 0.75, 0.75, 0, 0.25
    assert "4 trajectories, 3 changed, 0 unscorable" in done.output
    assert "1 groups in another order; mean 0.3750 -> 0.4375" in done.output
    assert "exact@1 -> exact_alnum@1+exact_text@1#" in done.output
    rows = list(csv.DictReader(report.open()))
    assert [(row["text"], float(row["old"]), float(row["new"])) for row in rows] == [
        ("yes", 1.0, 0.75),
        ("Yes", 0.0, 0.75),
        ("no", 0.0, 0.0),
        ("<answer>yes</answer>", 0.5, 0.25),
    ]
    assert [row["changed"] for row in rows] == ["True", "True", "False", "True"]
    assert json.loads(rows[0]["new_components"]) == {"exact_alnum@1": 0.0, "exact_text@1": 1.0}
    assert rows[0]["mark"] == "unparseable"  # exact_alnum found no tag
    assert (run_dir / "ledger.sqlite").read_bytes() == before


def test_the_recipes_reward_by_default_and_json(run_dir: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = rescore(str(run_dir), "--out", str(report))
    assert done.exit_code == 0, done.output
    body = json.loads(report.read_text())
    assert body["summary"]["changed"] == 1 and len(body["trajectories"]) == 4
    assert [row["new"] for row in body["trajectories"]] == [1.0, 0.0, 0.0, 0.0]


def test_unscorable_and_unkept_trajectories_are_counted(run_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"trajectory": "a", "group": "g", "prompt_id": "p", "step": 1, "reward": 1.0, "reward_version": "r@1",
         "components": {}, "text": "<answer>3</answer>", "ground_truth": "three"},
        {"trajectory": "b", "group": "g", "prompt_id": "p", "step": 1, "reward": 1.0},
    ]  # fmt: skip
    file = tmp_path / "export.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = rescore("--file", str(file), "--scorer", "numeric")
    assert done.exit_code == 0, done.output
    assert "1 trajectories, 1 changed, 1 unscorable" in done.output and "1 more are recorded" in done.output
    assert "invalid_request" in done.output


def test_mistakes_are_told_before_anything_is_scored(run_dir: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ([str(run_dir), "--scorer", "exact"], "unknown"),
        ([str(run_dir), "--out", str(tmp_path / "x.xlsx")], ".csv"),
        ([str(run_dir), "--scorer", "numeric", "--param", "numeric.relatve=1"], "relative"),
        ([str(run_dir), "--scorer", "numeric", "--param", "format.x=1"], "NAME.FIELD=VALUE"),
        ([str(tmp_path / "no")], "no run"),
        (["--file", str(tmp_path / "no.jsonl"), "--scorer", "format"], "No such file"),
        (["--file", str(tmp_path / "no.jsonl")], "say which scorers"),
    ]:
        done = rescore(*arguments)
        told = done.output + str(done.exception)
        assert done.exit_code != 0 and words in told, told
