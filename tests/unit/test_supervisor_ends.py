"""The supervisor says why a worker ended, and ends one that hangs after the registry gave it up."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from omnifleet.cli.status import show_status
from omnifleet.client.fleet import FleetView, WorkerView
from omnifleet.launch import supervisor as module
from omnifleet.launch.local import LocalLauncher, wait_gone
from omnifleet.launch.port import ProcessSpec
from omnifleet.launch.supervisor import Supervisor, Watched, why_ended
from omnifleet.types import WorkerState
from tests.unit.small_run import supervisor_of


class Fleet:
    """A registry that holds worker-0 for dead and wants nobody new."""

    async def scale(self, desired: int, reason: str) -> None:
        pass

    async def list(self, *, include_gone: bool) -> FleetView:
        dead = WorkerView(id="worker-0-abc", instance="abc", state=WorkerState.DEAD)
        return FleetView([dead] if include_gone else [], 0, None, 0)


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return supervisor_of(tmp_path, LocalLauncher(), Fleet())


def start(supervisor: Supervisor, code: str) -> Watched:
    log = supervisor._run_dir / "logs" / "worker-0.log"
    watched = supervisor._start(ProcessSpec("worker-0", [sys.executable, "-c", code], {}, log))
    supervisor._workers["worker-0"] = watched
    return watched


def test_an_exit_status_is_put_in_words() -> None:
    assert why_ended(0) == "left"
    assert why_ended(75) == "ended with status 75"
    assert why_ended(-9).startswith("was killed by SIGKILL")
    assert why_ended(-15) == "was killed by SIGTERM"


async def test_a_worker_that_left_is_in_the_status_with_its_reason(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "worker-0 ends: the registry holds this worker for dead: silent for 13.0 s"
    watched = start(supervisor, f"print({why!r})")
    assert wait_gone(watched.handle.pid, 20)
    await supervisor._follow_fleet()
    supervisor._write_state("running")
    [end] = json.loads((supervisor._run_dir / "supervisor.json").read_text())["ends"]
    assert (end["name"], end["exit"]) == ("worker-0", 0) and why in end["why"]
    (supervisor._run_dir / "services" / "gateway.json").unlink()
    await asyncio.to_thread(show_status, supervisor._run_dir, Console(width=200), as_json=False)
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"worker-0 (pid {end['pid']})" in line and f"left: {why}" in line


async def test_a_worker_that_hangs_after_it_was_given_up_is_ended(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = start(supervisor, "import time; time.sleep(600)")
    await supervisor._follow_fleet()
    assert watched.handle.poll() is None, "it may still learn of it and leave"
    monkeypatch.setattr(module, "_STOP_GRACE_S", 0.0)
    await supervisor._follow_fleet()
    assert wait_gone(watched.handle.pid, 20)
    await supervisor._follow_fleet()
    assert not supervisor._workers and supervisor._ends[-1]["exit"] < 0
