"""Sender, registry and workers, each the real one, with fake engines: weights arrive, late and fenced workers follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np

from omnifleet.auth import OPEN
from omnifleet.config.services import RolloutConfig
from omnifleet.types import WorkerState
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.fake import FakeEngine, fake_table
from omnifleet_rollout.worker.command import Worker
from omnifleet_rollout.worker.membership import Member
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.sender import RefitSender
from tests.contract.gateway_world import World, world
from tests.waiting import beside, until


def tensors(step: int) -> dict[str, np.ndarray]:
    """The fake engine's table; the first tensor is frozen."""
    names = [spec.name for spec in fake_table()]
    return {name: np.full((4, 8), step if i else -1, np.float32) for i, name in enumerate(names)}


def holds(worker: Worker, step: int) -> bool:
    engine = worker.engine
    assert isinstance(engine, FakeEngine)
    same = all(engine.weights.get(name) == value.tobytes() for name, value in tensors(step).items())
    return same and worker.standing.version.number == step and not worker.standing.fence


async def join(stack: AsyncExitStack, here: World, name: str) -> Worker:
    engine = FakeEngine()
    await engine.start()
    worker = Worker(engine, name, RolloutConfig(), OPEN)
    address = await stack.enter_async_context(
        serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="test", grace_s=0.2)
    )

    async def gateway() -> str:
        return here.address

    member = Member(
        engine,
        worker.standing,
        worker.counters,
        find_gateway=gateway,
        secret="",
        address=address,
        pool="default",
    )
    stack.callback(asyncio.create_task(member.run()).cancel)
    await seen(here, lambda states: worker.standing.worker in states)
    return worker


async def seen(
    here: World, condition: Callable[[dict[str, WorkerState]], bool], seconds: float = 20.0
) -> None:
    """Wait until the registry shows states, by worker, that meet the condition."""
    async with asyncio.timeout(seconds), aclosing(here.fleet.watch()) as views:
        async for view in views:
            if condition({worker.id: worker.state for worker in view.workers}):
                return


async def publish(sender: RefitSender, step: int) -> dict[str, str]:
    moved = {spec.name for spec in fake_table()[1:]}
    report = await sender.publish(step, iter(tensors(step).items()), moved, encoder_changed=False)
    return report.failed


async def test_weights_reach_every_worker_whatever_happens_to_it(tmp_path: Path) -> None:
    async with world(tmp_path) as here, AsyncExitStack() as stack:
        first, second = [await join(stack, here, f"worker-{i}") for i in range(2)]
        sender = await stack.enter_async_context(FileSender.open(here.address, "", run="r", lineage="l"))
        async with beside(sender.keep_up()):
            for step in range(3):
                assert not await publish(sender, step)
                assert holds(first, step) and holds(second, step)

            late = await join(stack, here, "worker-2")
            await until(lambda: holds(late, 2))

            assert isinstance(second.engine, FakeEngine)
            second.engine.fail_commit = True
            failed = await publish(sender, 3)
            assert list(failed) == [second.standing.worker]
            assert holds(first, 3)
            await until(lambda: holds(second, 3) and holds(late, 3))

            assert not await publish(sender, 4)
            assert holds(first, 4) and holds(second, 4) and holds(late, 4)
            await seen(here, lambda states: set(states.values()) == {WorkerState.READY})
