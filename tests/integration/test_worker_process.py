"""A worker as a process (fake engine) in the fleet: joins, becomes READY, survives a gateway restart, drains, stops."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, Verb
from omnifleet.client.rollout import RolloutClient
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Identity, Sampling, WeightVersion, WorkerState
from omnifleet_rollout.fleet.store import FleetStore
from tests import support_fleet
from tests.support_fleet import until

COMMAND = "from omnifleet_rollout.cli import app; app()"


@asynccontextmanager
async def worker_process(run_dir: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        "serve",
        "--run-dir",
        str(run_dir),
        "--engine",
        "fake",
        *options,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def fleet_at(run_dir: Path, store: FleetStore) -> AbstractAsyncContextManager[FleetClient]:
    """A registry with some patience."""
    return support_fleet.fleet_at(run_dir, store, heartbeat_s=0.05, suspect_after_s=2.0, dead_after_s=6.0)


@pytest.fixture
def store(tmp_path: Path) -> FleetStore:
    return FleetStore(tmp_path / "fleet.sqlite")


async def test_a_worker_joins_serves_survives_a_gateway_restart_and_drains(
    tmp_path: Path, store: FleetStore
) -> None:
    run_dir = tmp_path / "run"
    tokens = load_tokens(run_dir)
    async with worker_process(run_dir) as process:
        async with fleet_at(run_dir, store) as fleet:
            ready = await until(fleet, lambda worker: worker.state is WorkerState.READY)
            assert ready.id.startswith("worker-0-") and ready.engine.startswith("fake")
            assert ready.version == WeightVersion(
                "", "base", 0, ready.version.manifest_digest if ready.version else ""
            )
            assert read_records(run_dir)["worker-0"].grpc == ready.grpc_address
        async with fleet_at(
            run_dir, store
        ) as fleet:  # another port: the worker must look the gateway up again
            again = await until(fleet, lambda worker: worker.state is WorkerState.READY)
            assert again.id == ready.id
            async with RolloutClient.open(again.grpc_address, tokens.secret(Scope.SERVICE)) as client:
                reply = await client.generate(
                    prompt_token_ids=[10, 11],
                    sampling=Sampling(max_tokens=3),
                    identity=Identity("r"),
                    deadline_s=10,
                )
            assert len(reply.samples[0].token_ids) == 3 and reply.worker == ready.id
            await fleet.act(Verb.DRAIN, "worker-0")
            await until(fleet, lambda worker: worker.state is WorkerState.RETIRED)
            assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_newcomer_without_the_pools_weights_does_not_serve(tmp_path: Path, store: FleetStore) -> None:
    run_dir = tmp_path / "run"
    async with fleet_at(run_dir, store) as operator:
        address = read_records(run_dir)["gateway"].grpc
        async with FleetClient.open(address, load_tokens(run_dir).secret(Scope.TRAINER)) as trainer:
            await trainer.announce_version(WeightVersion("test", "a", 3))
        async with worker_process(run_dir):
            worker = await until(operator, lambda worker: worker.state is WorkerState.CATCHING_UP)
            assert "needs test/a:3" in worker.note


async def test_sigterm_leaves_and_ends_with_zero(tmp_path: Path, store: FleetStore) -> None:
    run_dir = tmp_path / "run"
    async with fleet_at(run_dir, store) as fleet, worker_process(run_dir) as process:
        await until(fleet, lambda worker: worker.state is WorkerState.READY)
        process.send_signal(signal.SIGTERM)
        await until(fleet, lambda worker: worker.state is WorkerState.RETIRED)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        "serve",
        "--run-dir",
        str(tmp_path),
        "--model",
        "/nowhere",
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode not in (0, None)
    lines = errors.decode().strip().splitlines()
    assert len(lines) == 1 and "/nowhere" in lines[0] and "model.path" in lines[0]
