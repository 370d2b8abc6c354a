"""kill -9 at random moments: what was acknowledged stays, nothing is lost, nothing counts twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnifleet_trainer.ledger import LedgerReader, SqliteLedger

_CHILD = Path(__file__).with_name("ledger_child.py")


def test_the_ledger_imports_no_torch() -> None:
    code = "import sys, omnifleet_trainer.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, kills=25, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kill_9_five_hundred_times(tmp_path: Path) -> None:
    for seed in range(2, 7):  # each looks through all that it holds after every kill
        folder = tmp_path / str(seed)
        folder.mkdir()
        _kill_again_and_again(folder, kills=100, seed=seed)


def _kill_again_and_again(folder: Path, *, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    path = folder / "ledger.sqlite"
    acknowledged: dict[int, int] = {}  # step -> samples, as far as the child said so
    for life in range(kills):
        said = _one_life(path, life, chance.uniform(0.0, 0.12))
        resumed_at = next((int(line[1]) for line in said if line[0] == "resumed"), None)
        if resumed_at is not None:
            acknowledged = {step: n for step, n in acknowledged.items() if step <= resumed_at}
        for line in said:
            if line[0] == "consumed":
                acknowledged[int(line[1])] = int(line[2])
        acknowledged = _check(path, acknowledged)
    ledger = SqliteLedger(path, owner="end")
    try:
        ledger.roll_back_to(max(acknowledged, default=0), "end")
        counts = ledger.counts()
        assert counts.consumed > 0 and counts.steps >= kills // 5
        assert (counts.in_flight, counts.lost, counts.consumed_twice) == (0, 0, 0)
    finally:
        ledger.close()


def _one_life(path: Path, life: int, seconds: float) -> list[list[str]]:
    """Start the child, let it work for `seconds` after it has opened the ledger, kill it; returns what it said."""
    child = subprocess.Popen(
        [sys.executable, str(_CHILD), str(path), str(life)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    try:
        said = [child.stdout.readline()]
        time.sleep(seconds)  # the moment of the kill, not a wait for anything
    finally:
        child.kill()
    said += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    return [line.split() for line in said if line.endswith("\n")]


def _check(path: Path, acknowledged: dict[int, int]) -> dict[int, int]:
    """What is consumed now: all that was acknowledged, and at most the step that was cut off before it was said."""
    counts = LedgerReader(path).counts()
    assert (counts.lost, counts.consumed_twice) == (0, 0)
    consumed: dict[int, int] = {}
    for row in LedgerReader(path).rows(state="consumed"):
        consumed[row.step] = consumed.get(row.step, 0) + 1
    for step, samples in acknowledged.items():
        assert consumed.get(step) == samples, f"step {step} was acknowledged and is gone"
    assert len(consumed) <= len(acknowledged) + 1
    return consumed
