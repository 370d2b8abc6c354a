"""Trainer and engines in turns, as processes: real services, two workers with FAKE engines, kill -9 of either side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from omnifleet.service import read_records
from omnifleet_trainer.ledger import LedgerReader
from tests.integration.test_trainer_process import said, services, steps_of, trainer, write_recipe

pytestmark = [pytest.mark.soak, pytest.mark.timeout(480)]


async def held(run_dir: Path, step: int) -> None:
    """Return in the middle of the trainer's turn, some time after `step`: it trains until `hold` is gone."""
    await steps_of(run_dir, step)
    folder = run_dir.parent
    (folder / "held").unlink(missing_ok=True)
    (folder / "hold").touch()
    async with asyncio.timeout(60):
        while not (folder / "held").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)


def let_go(run_dir: Path) -> None:
    (run_dir.parent / "hold").unlink()


def account(run_dir: Path) -> tuple[int, int, int, int]:
    counts = LedgerReader(run_dir / "ledger.sqlite").counts()
    return counts.consumed, counts.consumed_twice, counts.lost, counts.in_flight


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


async def test_a_run_in_turns_survives_the_death_of_either_side_in_the_trainers_turn(tmp_path: Path) -> None:
    run_dir = write_recipe(tmp_path, rollout={"workers": 2, "sleep_level": 1}, turn_timeout_s=60)
    async with services(run_dir):
        async with trainer(run_dir) as child:
            await held(run_dir, 2)
            child.kill()
            await child.wait()
            let_go(run_dir)
        (run_dir / "services" / "trainer.json").unlink()
        async with trainer(run_dir, "--resume") as child:
            await held(run_dir, 5)
            os.kill(read_records(run_dir)["worker-1"].pid, signal.SIGKILL)
            let_go(run_dir)
            assert await asyncio.wait_for(child.wait(), 120) == 0, said(run_dir)
    assert account(run_dir) == (12 * 6, 0, 0, 0)
    rows = [row for row in rows_of(run_dir) if "turn/sleep_s" in row]
    assert sum(row["turn/in_flight"] for row in rows) > 0, "replies go on across turns"
    assert max(row["lag_max"] for row in rows) <= 1


@pytest.mark.parametrize(("budget", "level"), [(0, 1), (1, 0), (2, 2)])
async def test_turns_at_every_budget_and_level(tmp_path: Path, budget: int, level: int) -> None:
    rollout = {"workers": 2, "sleep_level": level}
    run_dir = write_recipe(tmp_path, rollout=rollout, max_staleness=budget, steps=8)
    async with services(run_dir), trainer(run_dir) as child:
        assert await asyncio.wait_for(child.wait(), 150) == 0, said(run_dir)
    assert account(run_dir) == (8 * 6, 0, 0, 0)
    rows = [row for row in rows_of(run_dir) if "turn/sleep_s" in row]
    assert len(rows) == 8 and max(row["lag_max"] for row in rows) <= budget
