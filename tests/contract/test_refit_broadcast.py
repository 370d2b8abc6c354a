"""The broadcast sender with a registry and three workers: whole fleet at once, newcomers and fenced ones alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnifleet.types import InFlight
from omnifleet_rollout.refit.shadow import rejected
from omnifleet_trainer.refit.broadcast import BroadcastSender
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_registry import Registry
from tests.refit_world import CPU, Receiving, receiving
from tests.waiting import beside, until


@dataclass
class Fleet:
    registry: Registry
    sender: BroadcastSender
    workers: list[Receiving]
    stack: AsyncExitStack
    checkpoint: Path

    async def publish(self, step: int) -> Any:
        return await self.sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)

    async def join(self, count: int) -> list[Receiving]:
        joined = await self.stack.enter_async_context(receiving(self.checkpoint, count))
        for number, worker in enumerate(joined, len(self.workers)):
            worker.id = f"w{number}"
            self.registry.workers[worker.id] = worker
        self.workers += joined
        self.registry.moved()
        return joined


@asynccontextmanager
async def fleet_of(count: int, tmp_path: Path, **settings: Any) -> AsyncIterator[Fleet]:
    registry = Registry()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(registry.served())
        options = {
            "run": "r",
            "lineage": "l",
            "device": CPU,
            "host": "127.0.0.1",
            "device_bucket_bytes": 16 << 10,
            "in_flight": InFlight.KEEP,
            "timeout_s": 20.0,
        } | settings
        sender = await stack.enter_async_context(BroadcastSender.connect(address, "", **options))
        fleet = Fleet(registry, sender, [], stack, write_checkpoint(tmp_path / "c"))
        await fleet.join(count)
        yield fleet


@pytest.mark.parametrize("rolling", [False, True])
async def test_a_publish_reaches_all_at_once_and_later_ones_carry_what_changed(
    tmp_path: Path, rolling: bool
) -> None:
    async with fleet_of(3, tmp_path, rolling=rolling) as fleet:
        first = await fleet.publish(0)
        second = await fleet.publish(1)
        assert first.ok == second.ok == ("w0", "w1", "w2") and not second.failed
        assert all(worker.holds(1) for worker in fleet.workers)
        assert second.bytes < first.bytes and fleet.registry.announced == [0, 1]
        assert [worker.engine.by_plan for worker in fleet.workers] == [[False, True]] * 3


async def test_late_and_fenced_workers_are_brought_up_alone_and_then_go_with_the_others(
    tmp_path: Path,
) -> None:
    async with fleet_of(2, tmp_path) as fleet, beside(fleet.sender.keep_up()):
        for step in range(2):
            assert not (await fleet.publish(step)).failed
        (late,) = await fleet.join(1)
        await until(lambda: late.holds(1) and not fleet.sender.catching_up.behind)
        broken = fleet.workers[0]
        await broken.client.quarantine("a test said so")

        def healed() -> bool:
            fleet.registry.moved()  # as heartbeats do
            return broken.holds(1) and not fleet.sender.catching_up.behind

        await until(healed)
        report = await fleet.publish(2)
        assert report.ok == ("w0", "w1", "w2")
        assert all(worker.holds(2) for worker in fleet.workers)


async def test_a_worker_that_missed_versions_gets_the_buckets_that_differ_from_its_own(
    tmp_path: Path,
) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        await fleet.publish(0)
        away = fleet.registry.workers.pop("w1")
        await fleet.publish(1)
        await fleet.publish(2)
        assert away.holds(0)
        fleet.registry.workers["w1"] = away
        report = await fleet.publish(3)
        assert report.ok == ("w0", "w1") and all(worker.holds(3) for worker in fleet.workers)


async def test_a_dead_worker_is_reported_and_the_others_commit(tmp_path: Path) -> None:
    async with fleet_of(3, tmp_path) as fleet:
        await fleet.publish(0)
        fleet.workers[1].address = "127.0.0.1:1"
        report = await fleet.publish(1)
        assert report.ok == ("w0", "w2") and list(report.failed) == ["w1"]
        assert fleet.workers[0].holds(1) and fleet.workers[2].holds(1) and fleet.workers[1].holds(0)


async def test_NCL_10_a_worker_whose_last_bucket_fails_keeps_its_version_and_is_healed_by_the_retry(
    tmp_path: Path,
) -> None:
    async with fleet_of(3, tmp_path) as fleet:
        await fleet.publish(0)
        victim = fleet.workers[1]
        receive = victim.engine.stager._reception.collective.receive

        def spoil(body: Any, source: str) -> Any:
            received = receive(body, source)
            raise rejected(f"the last bucket of {len(received)} tensors does not match its checksum")

        victim.engine.stager._reception.collective.receive = spoil  # type: ignore[method-assign]
        report = await fleet.publish(1)
        assert report.ok == ("w0", "w2") and "checksum" in report.failed["w1"]
        assert victim.holds(0) and victim.version.number == 0, "it is not tagged with the new version"
        assert fleet.workers[0].holds(1) and fleet.workers[2].holds(1)
        victim.engine.stager._reception.collective.receive = receive  # type: ignore[method-assign]
        async with beside(fleet.sender.keep_up()):
            await until(lambda: victim.holds(1))
