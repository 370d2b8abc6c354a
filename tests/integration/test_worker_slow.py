"""A slow worker is not a dead one: held-up event loops, stopped processes, and what a worker says when it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omnifleet.client.fleet import FleetClient, Verb, WorkerView
from omnifleet.types import WorkerState
from omnifleet_rollout.fleet.store import FleetStore
from tests import support_fleet
from tests.support_fleet import until

BUSY_S = 5
"""How long a test keeps a worker from its event loop: well over DEAD_S."""
DEAD_S = 1.5
WORKER = f"""
import asyncio, ctypes, signal
from pathlib import Path
from omnifleet_rollout.worker import start

def hold_the_interpreter(*_):
    ctypes.PyDLL(None).sleep({BUSY_S})  # no Python thread runs meanwhile, as in a long call of a native library

signal.signal(signal.SIGUSR1, hold_the_interpreter)
from omnifleet_rollout.cli import app
app()
"""


@asynccontextmanager
async def worker(run_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker with a fake engine; SIGUSR1 makes it deaf for BUSY_S."""
    command = [sys.executable, "-c", WORKER, "serve", "--run-dir", str(run_dir), "--engine", "fake"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def fleet_at(run_dir: Path) -> AsyncIterator[FleetClient]:
    """A registry with little patience."""
    store = FleetStore(run_dir / "fleet.sqlite")
    async with support_fleet.fleet_at(
        run_dir, store, heartbeat_s=0.1, suspect_after_s=0.5, dead_after_s=DEAD_S
    ) as client:
        yield client
    store.close()


def is_ready(view: WorkerView) -> bool:
    return view.state is WorkerState.READY


@pytest.mark.timeout(200)
async def test_a_worker_whose_loop_is_held_up_is_suspect_and_comes_back(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as fleet, worker(tmp_path) as process:
        before = await until(fleet, is_ready)
        process.send_signal(signal.SIGUSR1)
        suspect = await until(fleet, lambda view: "its process answers" in view.note)
        assert suspect.state is WorkerState.SUSPECT
        after = await until(fleet, lambda view: is_ready(view) or view.state.gone)
        assert (after.state, after.id, after.pid) == (WorkerState.READY, before.id, process.pid)
        process.terminate()
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert "event loop was held up for" in errors.decode()


@pytest.mark.timeout(200)
async def test_a_stopped_process_is_dead_and_says_why_it_ends_once_it_goes_on(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as fleet, worker(tmp_path) as process:
        await until(fleet, is_ready)
        process.send_signal(signal.SIGSTOP)
        try:
            dead = await until(fleet, lambda view: view.state.gone)
        finally:
            process.send_signal(signal.SIGCONT)
        assert dead.state is WorkerState.DEAD and "does not answer" in dead.note
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        last = errors.decode().strip().splitlines()[-1]
        assert process.returncode == 0
        assert "worker-0 ends: the registry holds this worker for dead: silent for" in last


@pytest.mark.timeout(200)
async def test_a_short_stop_changes_nothing(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as fleet, worker(tmp_path) as process:
        before = await until(fleet, is_ready)
        process.send_signal(signal.SIGSTOP)
        try:
            await until(fleet, lambda view: view.state is WorkerState.SUSPECT)
        finally:
            process.send_signal(signal.SIGCONT)
        after = await until(fleet, lambda view: is_ready(view) or view.state.gone)
        assert (after.state, after.id) == (WorkerState.READY, before.id)


@pytest.mark.timeout(200)
async def test_a_worker_that_is_told_to_go_says_who_told_it(tmp_path: Path) -> None:
    async with fleet_at(tmp_path) as fleet, worker(tmp_path) as process:
        await until(fleet, is_ready)
        await fleet.act(Verb.RETIRE, "worker-0", "no longer wanted")
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert (
            "worker-0 ends: the registry holds this worker for retired: no longer wanted" in errors.decode()
        )
