"""The canary over real processes: a worker that computes something else is put back, says why, and serves on."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.auth import Scope, Tokens
from omnifleet.client.fleet import WorkerView
from omnifleet.client.rollout import RolloutClient
from omnifleet.types import WorkerState
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.guard import Canary, Guard
from omnifleet_trainer.refit.sender import RefitSender
from tests.contract.gateway_world import World, world
from tests.refit_model import MOVES, expected, scores, tensors, write_checkpoint
from tests.refit_processes import forkserver, run_worker
from tests.refit_world import CPU

pytestmark = pytest.mark.timeout(240)
SPOILED = {11}
"""Version after which one worker computes something else, once in each lineage (numbers 10, 11, 12)."""


@asynccontextmanager
async def processes(checkpoint: Path, here: World, tokens: Tokens) -> AsyncIterator[list[str]]:
    """Two workers in processes of their own; the second one goes wrong at SPOILED. Their ids."""
    context = forkserver()
    async with AsyncExitStack() as stack:
        pipes = []
        for number in range(2):
            ours, theirs = multiprocessing.Pipe()
            spoiled = SPOILED if number else set[int]()
            told = (str(checkpoint), f"worker-{number}", here.address, tokens, spoiled, theirs)
            process = context.Process(target=run_worker, args=told)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            pipes.append(ours)
        async with asyncio.timeout(120):
            while not all(pipe.poll() for pipe in pipes):  # noqa: ASYNC110  pipes tell no event
                await asyncio.sleep(0.02)
        yield [pipe.recv() for pipe in pipes]


async def seen(here: World, condition: Callable[[dict[str, WorkerView]], bool]) -> dict[str, WorkerView]:
    """The registry's view once it meets the condition."""
    async with asyncio.timeout(60), aclosing(here.fleet.watch()) as views:
        async for view in views:
            workers = {worker.id: worker for worker in view.workers}
            if condition(workers):
                return workers
    raise AssertionError("the watch ended")


def guarded(sender: RefitSender, secret: str, step: list[int]) -> None:
    canary = Canary((10, 11), (3, 4, 5), 1e-6)

    async def expect(batch: StepBatch) -> list[float]:
        return scores(expected(step[0]), batch.samples[0].token_ids)

    sender.guard = Guard(canary, secret, expect)


async def follow(here: World, sender: RefitSender, workers: list[str], secret: str) -> None:
    """Versions 10, 11, 12 of one lineage."""
    step = [0]
    guarded(sender, secret, step)

    async def publish(number: int) -> Any:
        step[0] = number
        return await sender.publish(number, iter(tensors(number).items()), MOVES, encoder_changed=False)

    good, bad = workers
    report = await publish(10)
    assert report.ok == (good, bad), report.failed
    report = await publish(11)
    assert report.ok == (good,) and "again" in report.failed[bad]
    views = await seen(
        here,  # within the lag that is allowed it serves on
        lambda w: (
            [w[id].version.number for id in workers if w[id].version] == [11, 10]
            and w[bad].state is WorkerState.READY
            and "put back" in w[bad].note
        ),
    )
    assert "put back from" in views[bad].note and "differ from the trainer's" in views[bad].note
    assert views[bad].counters["refits_quarantined"] >= 1
    async with RolloutClient.open(views[bad].grpc_address, secret) as client:
        served, version = await client.score_tokens((10, 11), (3, 4, 5), deadline_s=30)
        assert version.number == 10 and served == pytest.approx(scores(expected(10), (3, 4, 5)))
        assert "put back" in (await client.status()).facts["note"]
    report = await publish(12)
    assert report.failed == {}
    keeping = asyncio.create_task(sender.keep_up())
    try:
        views = await seen(here, lambda w: all(w[id].version.number == 12 for id in workers))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    await seen(here, lambda w: all(w[id].state is WorkerState.READY for id in workers) and not w[bad].note)


async def test_a_worker_that_the_canary_tells_against_serves_the_version_before_and_says_why(
    tmp_path: Path,
) -> None:
    tokens = Tokens.generate()
    secret = tokens.secret(Scope.TRAINER)
    async with world(tmp_path, tokens=tokens, heartbeat_s=1.5) as here:  # a busy machine skips some
        async with processes(write_checkpoint(tmp_path / "c"), here, tokens) as workers:
            async with FileSender.open(here.address, secret, run="r", lineage="files") as files:
                await follow(here, files, workers, secret)
            group = BroadcastSender.connect(
                here.address,
                secret,
                run="r",
                lineage="group",
                device=CPU,
                host="127.0.0.1",
                device_bucket_bytes=16 << 10,
            )
            async with group as broadcast:
                await follow(here, broadcast, workers, secret)
