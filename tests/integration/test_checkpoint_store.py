"""Checkpoints survive kill -9 at any moment; field case CKP-01. The writer is a light process without torch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.checkpoint import (
    CheckpointState,
    Retention,
    latest_checkpoint,
    oldest_step,
    prune,
    write_checkpoint,
)
from omnifleet_trainer.policy.fake import FakePolicy

WRITER = """
import sys, time
from pathlib import Path
from omnifleet_trainer.checkpoint import CheckpointState, write_checkpoint

def save(folder):
    (folder / "policy").mkdir()
    for i in range(40):
        (folder / "policy" / f"part-{i}").write_bytes(bytes(20_000))
        if i == 0: print("writing", flush=True)
    (folder / "policy" / "whole").write_text("4")

assert "torch" not in sys.modules
state = CheckpointState(step=4, version=4, lineage="l", ledger_position=40, config_digest="d")
write_checkpoint(Path(sys.argv[1]), 4, save_policy=save, state=state)
print("done", flush=True)
"""


def state(step: int) -> CheckpointState:
    return CheckpointState(
        step=step, version=step, lineage="l", ledger_position=10 * step, config_digest="d", seeds={"data": 7}
    )


def save(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "weights").write_bytes(b"w")


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_ckp_01_kill_at_random_times_leaves_a_complete_checkpoint(tmp_path: Path, kills: int) -> None:
    random.seed(1)
    seen = set()
    for attempt in range(kills):
        root = tmp_path / str(attempt)
        write_checkpoint(root, 2, save_policy=save, state=state(2))
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        time.sleep(random.uniform(0, 0.03))  # the moment of the kill, not a wait
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        found = latest_checkpoint(root)
        assert found is not None
        path, resumed = found
        seen.add(resumed.step)
        assert resumed.step in (2, 4) and resumed.ledger_position == 10 * resumed.step
        if resumed.step == 4:
            assert len(list((path / "policy").iterdir())) == 41
        assert [child.name for child in root.iterdir() if child.name.startswith(".")] == []
    assert 2 in seen


def test_the_newest_complete_one_wins_and_the_last_k_stay(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (9, 10, 100):
        write_checkpoint(tmp_path, step, save_policy=save, state=state(step))
    assert latest_checkpoint(tmp_path) == (tmp_path / "step_00000100", state(100))
    assert [path.name for path in prune(tmp_path, Retention(2))] == ["step_00000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000100"]
    assert prune(tmp_path, Retention(2)) == []


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3, save_policy=save, state=state(3))
    again = write_checkpoint(tmp_path, 3, save_policy=save, state=CheckpointState(3, 3, "l", 31, "d"))
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[0] == again and found[1].ledger_position == 31
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_save_leaves_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, save_policy=save, state=state(1))

    def full(folder: Path) -> None:
        save(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OmnifleetError) as caught:
        write_checkpoint(tmp_path, 2, save_policy=full, state=state(2))
    assert caught.value.reason is Reason.DISK_FULL
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_an_unreadable_state_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, save_policy=save, state=state(1))
    (path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(OmnifleetError) as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.reason is Reason.CORRUPT


def test_a_scratch_folder_of_a_process_that_lives_is_left_alone(tmp_path: Path) -> None:
    parent = tmp_path / f".writing-5-abcd-{os.getppid()}"
    parent.mkdir()
    write_checkpoint(tmp_path, 1, save_policy=save, state=state(1))
    assert parent.exists()


def test_the_fake_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = FakePolicy()
    policy.weights, policy.trained = [0.5, -1.0], [["a"], ["b"]]
    path = write_checkpoint(tmp_path, 2, save_policy=policy.save, state=state(2))
    other = FakePolicy()
    other.load(path)
    assert (other.weights, other.trained) == (policy.weights, policy.trained)
    with pytest.raises(OmnifleetError):
        other.load(tmp_path)


def test_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2}
    for step, score in scores.items():
        body = CheckpointState(step, step, "l", 0, "d", extra={"metric": score})
        write_checkpoint(tmp_path, step, save_policy=save, state=body)
    prune(tmp_path, Retention(latest=1, best=2))
    assert [int(path.name[5:]) for path in sorted(tmp_path.iterdir())] == [2, 4, 6]
    assert oldest_step(tmp_path) == 2
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[1].step == 6
