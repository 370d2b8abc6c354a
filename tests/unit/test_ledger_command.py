"""`omnifleet ledger`: query, export, replay on a small ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from omnifleet.errors import OmnifleetError
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from omnifleet_trainer.ledger.command import app
from omnifleet_trainer.ledger.replay import replay, step_rows
from tests.unit.ledger_samples import group_of

RUNNER = CliRunner()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text("{}")
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", owner="me")
    ledger.roll_back_to(0, "a")
    ledger.add_epoch(0, ["p0", "p1"])
    for step, reward in ((1, 1.0), (2, 0.5)):
        (lease,) = ledger.lease_next(1, version=step - 1, ttl_s=60)
        ledger.record_group(lease, group_of(lease, versions=(0, step - 1), reward=reward))
        ledger.consume([lease.attempt], step=step, version=step - 1)
    ledger.close()
    recorded = {
        "step": 2,
        "samples": 2.0,
        "reward": 0.5,
        "response_tokens": 4.0,
        "lag_max": 1.0,
        "lag_mean": 0.5,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(recorded) + "\n{torn")
    return tmp_path


def test_query_counts_and_selects(run_dir: Path) -> None:
    counts = RUNNER.invoke(app, ["query", "--run", str(run_dir)])
    assert counts.exit_code == 0 and json.loads(counts.output)["consumed"] == 4
    rows = RUNNER.invoke(app, ["query", "--run", str(run_dir), "--sql", "SELECT payload FROM groups"])
    assert json.loads(rows.output.splitlines()[0])["payload"].endswith("bytes>")


def test_the_account_is_of_one_moment_while_a_training_goes_on(run_dir: Path) -> None:
    path = run_dir / "ledger.sqlite"
    reader, writer = LedgerReader(path), SqliteLedger(path, owner="me")
    with reader.one_look() as look:
        writer.add_epoch(1, ["p2"])
        (lease,) = writer.lease_next(1, version=2, ttl_s=60)
        writer.record_group(lease, group_of(lease, versions=(2,), reward=0.0))
        counts = look.counts()
        assert counts.attempts == sum(look.outcomes().values()) == 2
        assert len(list(look.rows())) == counts.trajectories == 4
        assert (
            look.consumed_up_to(2) == counts.consumed and len(look.select("SELECT * FROM attempts")[1]) == 2
        )
    writer.close()
    assert reader.counts().attempts == sum(reader.outcomes().values()) == 3


def test_export_gives_the_same_rows_in_both_formats(run_dir: Path, tmp_path: Path) -> None:
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    for out in (lines, table):
        done = RUNNER.invoke(app, ["export", "--run", str(run_dir), "--step", "2", "--out", str(out)])
        assert done.exit_code == 0, done.output
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    kept = pq.read_table(table).to_pylist()
    assert len(told) == len(kept) == 2
    for name in (
        "trajectory",
        "reward",
        "reward_version",
        "token_ids",
        "logprobs",
        "prompt_token_ids",
        "step",
        "text",
    ):
        assert [row[name] for row in told] == [row[name] for row in kept]
    assert json.loads(kept[0]["spans"]) == told[0]["spans"]
    assert kept[0]["media"] == ["ab" * 32]


def test_export_refuses_a_format_it_does_not_know(run_dir: Path) -> None:
    refused = RUNNER.invoke(app, ["export", "--run", str(run_dir), "--out", str(run_dir / "rows.xlsx")])
    assert isinstance(refused.exception, OmnifleetError) and "parquet" in str(refused.exception)


def test_replay_holds_a_step_against_its_record(run_dir: Path) -> None:
    same = RUNNER.invoke(app, ["replay", "--run", str(run_dir), "--step", "2"])
    assert same.exit_code == 0 and "DIFFERS" not in same.output
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 2, "reward": 0.75}) + "\n")
    other = RUNNER.invoke(app, ["replay", "--run", str(run_dir), "--step", "2"])
    assert other.exit_code == 1 and "DIFFERS" in other.output
    shown = RUNNER.invoke(app, ["replay", "--run", str(run_dir), "--step", "2", "--show", "groups"])
    assert "exact@1" in shown.output and "'yes'" in shown.output


def test_replay_recomputes_by_hand(run_dir: Path) -> None:
    rows = step_rows(LedgerReader(run_dir / "ledger.sqlite"), 2)
    numbers = {check.name: check.ledger for check in replay(rows, {})}
    # Two samples of two tokens, made by weights 0 and 1 and trained by weights 1: lags 1 and 0.
    assert numbers == {
        "samples": 2.0,
        "reward": 0.5,
        "response_tokens": 4.0,
        "response_tokens_max": 2.0,
        "lag_max": 1.0,
        "lag_mean": 0.5,
    }
    with pytest.raises(OmnifleetError, match="nothing that step 9"):
        step_rows(LedgerReader(run_dir / "ledger.sqlite"), 9)
