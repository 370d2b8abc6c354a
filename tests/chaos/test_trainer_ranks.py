"""A run whose policy has two ranks: one is killed, the supervisor starts the trainer again, nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from omnifleet.report.records import read_run
from tests.support_run import CliRun, until

pytestmark = pytest.mark.heavy
STEPS = 5


def follower_of(trainer: int) -> int | None:
    """Process id of the second rank that a trainer process has started."""
    try:
        children = psutil.Process(trainer).children()
        found = [child.pid for child in children if "omnifleet_trainer.policy.follower" in child.cmdline()]
    except psutil.NoSuchProcess:
        return None
    return found[0] if found else None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_of_two_ranks_goes_on_after_one_is_lost(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run(
        "trainer.backend=automodel",
        "trainer.parallel.dp=2",
        "trainer.threads=1",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=1",
        engine="fake:0.05",
    )
    run.train()
    run.wait_step(2, 240)
    trainer = run.pid("trainer")
    follower = until(lambda: follower_of(trainer), 60, "the second rank is up")
    os.kill(follower, signal.SIGKILL)
    until(lambda: run.pid("trainer") != trainer, 120, "the trainer is started again")
    assert run.finish(300) == 0
    steps = [row["step"] for row in read_run(run.run_dir).steps]
    assert steps[-1] == STEPS
    left = [p.pid for p in psutil.process_iter() if p.pid == follower or p.ppid() == trainer]
    assert not left
