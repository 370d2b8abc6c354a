"""A policy whose second rank lives on another node, here a process of its own that only knows the run's folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from omnifleet.auth import Scope
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import load_tokens
from omnifleet_trainer.policy.frames import send
from omnifleet_trainer.policy.nodes import RECORD, Door, Meeting
from omnifleet_trainer.policy.world import WorldPolicy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from tests.integration.family_world import batch_for
from tests.integration.rank_world import equal, history, job, opened

SIZES = {"dp": 2, "nodes": 2, "timeout_s": 120}


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    (tmp_path / "run").mkdir()
    body = {"trainer": {"parallel": SIZES}}
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(body))
    secret = load_tokens(tmp_path / "run").secret(Scope.SERVICE)
    return Meeting(tmp_path / "run", secret, "127.0.0.1")


@pytest.fixture
def node(meeting: Meeting) -> Iterator[subprocess.Popen[bytes]]:
    """The second node, which the launcher starts."""
    command = [sys.executable, "-m", "omnifleet", "trainer", "follow"]
    process = subprocess.Popen([*command, "--run-dir", str(meeting.run_dir), "--node", "1"])
    yield process
    process.terminate()
    assert process.wait(60) == 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.heavy
@pytest.mark.soak
def test_two_nodes_train_as_one_and_a_lost_one_is_replaced_by_the_next_life(
    meeting: Meeting, node: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    source = tmp_path / "model"
    write_checkpoint(source, family="qwen3_vl", hidden=64)
    one = opened(source)
    try:
        alone = history(one, source)
    finally:
        one.close()
    world = WorldPolicy(job(source, parallel=SIZES), meeting=meeting)
    try:
        equal(history(world, source, tmp_path / "saved"), alone)
        (rank,) = children(node.pid)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(OmnifleetError, match="rank 1 of the policy is lost") as lost:
            world.train(batch_for(source))
        assert lost.value.reason is Reason.UNAVAILABLE and lost.value.retryable
    finally:
        world.close()
    again = WorldPolicy(job(source, parallel=SIZES), meeting=meeting)  # as the supervisor starts the trainer
    try:
        again.load(tmp_path / "saved")
        resumed = again.train(batch_for(source))
        assert resumed["loss"] == pytest.approx(alone.then["loss"], rel=1e-4)
    finally:
        again.close()


def test_a_rank_that_does_not_know_the_secret_is_not_let_in_and_one_that_never_comes_is_named(
    meeting: Meeting,
) -> None:
    door = Door(meeting)
    found = json.loads((meeting.run_dir / RECORD).read_text())
    with socket.create_connection((found["host"], found["port"])) as stranger:
        with stranger.makefile("wb") as stream:
            send(stream, {"rank": 1, "secret": "guess"})  # type: ignore[arg-type]
        with pytest.raises(OmnifleetError, match=r"ranks \[1\] of the policy did not come") as refused:
            door.admitted([1], 0.5)
        stranger.settimeout(60)
        assert stranger.recv(1) == b""
    door.close()
    assert refused.value.retryable and refused.value.knob == "trainer.parallel.nodes"
