"""Workers as processes, and no trainer any more: each newcomer takes the weights from one that serves, even after that one died."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient
from omnifleet.service import ServiceRecord
from omnifleet.types import WorkerState
from omnifleet_rollout.engine.fake import fake_table
from omnifleet_trainer.refit.files import FileSender
from tests.integration.test_fleet_processes import WORKER, Run, named, ready, running, seen


async def newcomer(run: Run, name: str) -> ServiceRecord:
    """A fake engine that waits half a second for the trainer."""
    return await run.start(
        name, WORKER, "--engine", "fake", "--name", name, "--set", "rollout.peers_after_s=0.5"
    )


def weights(step: int) -> Any:
    return iter([(spec.name, np.full((4, 8), step, np.float32)) for spec in fake_table()])


async def test_restarted_workers_catch_up_from_peers_while_there_is_no_trainer(tmp_path: Path) -> None:
    moves = {spec.name for spec in fake_table()}
    async with running(tmp_path) as run:
        gateway = await run.gateway()
        await newcomer(run, "worker-0")
        trainer = run.tokens.secret(Scope.TRAINER)
        async with FleetClient.open(gateway.grpc, run.tokens.secret(Scope.OPERATOR)) as fleet:
            await seen(fleet, ready("worker-0"))
            async with FileSender.open(gateway.grpc, trainer, run="r", lineage="l") as sender:
                for step in range(2):
                    report = await sender.publish(step, weights(step), moves, encoder_changed=False)
                    assert not report.failed
            await newcomer(run, "worker-1")
            view = await seen(fleet, ready("worker-0", "worker-1"))
            version = named(view, "worker-0").version
            assert version is not None and version.number == 1
            assert named(view, "worker-1").version == version, "the very version"
            await run.end("worker-0", signal.SIGKILL)
            await seen(fleet, lambda view: named(view, "worker-0").state is WorkerState.DEAD)
            await newcomer(run, "worker-2")
            view = await seen(fleet, ready("worker-1", "worker-2"))
            assert named(view, "worker-2").version == version
