"""Turns on shared devices against the real registry and two real workers with fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from omnifleet.auth import OPEN
from omnifleet.client.fleet import WorkerView
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WorkerState
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.worker.command import Worker
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.policy.fake import FakePolicy
from omnifleet_trainer.server.turns import SharedDevices
from tests.contract.gateway_world import World, world


@dataclass
class Sender:
    """Remembers what it was told."""

    said: list[Any] = field(default_factory=list)

    def rest(self) -> None:
        self.said.append("rest")

    def go_on(self, bare: Collection[str]) -> None:
        self.said.append(sorted(bare))


class MovingPolicy(FakePolicy):
    """Remembers where it was moved, and may be slow about it."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[str] = []

    def onload(self) -> None:
        self.moves.append("on")

    def offload(self) -> None:
        self.moves.append("off")


@dataclass
class Scene:
    gateway: World
    turns: SharedDevices
    sender: Sender
    policy: MovingPolicy
    counters: Counters
    workers: dict[str, Worker]
    leases: dict[str, str]
    stops: dict[str, AsyncExitStack]

    def asleep(self) -> list[bool]:
        return [worker.receiver.rest.asleep for worker in self.workers.values()]


@asynccontextmanager
async def scene(folder: Path, *, level: int = 1, timeout_s: float = 20.0) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(world(folder))
        workers, leases, stops = {}, {}, {}
        for name in ("w-1", "w-2"):
            engine = FakeEngine()
            await engine.start()
            workers[name] = Worker(engine, name, RolloutConfig(), OPEN)
            stops[name] = await stack.enter_async_context(AsyncExitStack())
            address = await stops[name].enter_async_context(
                serving("127.0.0.1:0", workers[name].register, tokens=OPEN, knob="listen", grace_s=0.1)
            )
            view = WorkerView(
                id=name, instance="i", grpc_address=address, state=WorkerState.CATCHING_UP,
                version=workers[name].standing.version,
            )  # fmt: skip
            leases[name] = (await gateway.fleet.join(view)).lease_id
        sender, counters, policy = Sender(), Counters("trainer"), MovingPolicy()
        turns = await stack.enter_async_context(
            SharedDevices.open(
                gateway.address, "", sender, counters, level=level, timeout_s=timeout_s, pool="default"
            )
        )
        await turns.begin(2, timeout_s=20.0)
        weights = Weights(policy, run="test", lineage="a", step=0)
        stack.callback(weights.close)
        turns.give(weights)
        yield Scene(gateway, turns, sender, policy, counters, workers, leases, stops)


async def test_devices_change_hands_in_order(tmp_path: Path) -> None:
    async with scene(tmp_path) as w:
        assert w.asleep() == [True, True], "the policy was opened while the engines slept"
        for _ in range(2):
            await w.turns.refit()
            assert w.policy.moves[-1] == "off"
            for worker in w.workers.values():
                worker.receiver.rest.check_weights()
            await w.turns.generate()
            assert w.asleep() == [False, False]
            metrics = await w.turns.train()
            assert w.asleep() == [True, True] and w.policy.moves[-1] == "on"
            assert metrics.keys() == {"turn/sleep_s", "turn/onload_s", "turn/in_flight"}
        assert w.policy.moves == ["off", "on"] * 2
        assert w.sender.said == ["rest", [], [], "rest", [], [], "rest"]
    assert w.asleep() == [False, False], "whoever trained leaves no engine asleep"


async def test_a_worker_that_died_asleep_holds_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path) as w:
        await w.stops["w-1"].aclose()
        await w.gateway.fleet.leave(w.leases["w-1"], "died")
        await w.turns.refit()
        await w.turns.generate()
        assert w.asleep() == [True, False] and not w.counters.count("turns_not_woken")
        await w.turns.train()
        assert w.asleep()[1]


async def test_a_worker_that_keeps_the_device_stops_the_turn_in_time(tmp_path: Path) -> None:
    async with scene(tmp_path, timeout_s=1.0) as w:
        await w.turns.generate()
        async with w.workers["w-1"].receiver._busy:
            with pytest.raises(OmnifleetError) as late:
                await w.turns.train()
        assert (late.value.reason, late.value.knob) == (Reason.DEADLINE, "trainer.turn_timeout_s")
        assert w.policy.moves == ["off"], "the policy stays away from a device that is not free"
        await w.turns.train()
        assert w.asleep() == [True, True]


async def test_what_dropped_its_weights_is_named_to_the_sender(tmp_path: Path) -> None:
    async with scene(tmp_path, level=2) as w:
        await w.turns.refit()
        assert w.sender.said[-1] == ["w-1", "w-2"]
        assert all(worker.standing.state is WorkerState.STALE for worker in w.workers.values())


async def test_a_trainer_that_starts_again_finds_engines_asleep_and_goes_on(tmp_path: Path) -> None:
    async with scene(tmp_path) as w:
        again = SharedDevices(
            w.gateway.fleet, "", Sender(), w.counters, level=1, timeout_s=20.0, pool="default"
        )
        await again.begin(2, timeout_s=20.0)
        await again.refit()
        await again.generate()
        assert w.asleep() == [False, False]


async def test_without_any_engine_the_run_does_not_begin(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        turns = SharedDevices(
            gateway.fleet, "", Sender(), Counters("trainer"), level=1, timeout_s=1.0, pool="default"
        )
        with pytest.raises(OmnifleetError) as late:
            await asyncio.wait_for(turns.begin(1, timeout_s=0.5), 20)
        assert late.value.reason is Reason.DEADLINE
