"""What only shows after thousands of times: descriptors and memory of broken calls, wake-ups of a run that is paused.

Each test has a short form for every day; the long one runs in `make soak`.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import psutil
import pytest

from omnifleet.client.rollout import RolloutClient
from omnifleet.types import Generation, Identity, Sampling
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import sampling_to_wire
from omnifleet_rollout.engine.fake import FakeEngine
from tests.contract.test_worker_generate import running
from tests.unit.loop_world import world
from tests.waiting import until

PROMPT = [10, 11, 12]
SIDE_BY_SIDE = 32
GROWTH_BYTES = 50 << 20


def soak(value: int, timeout_s: int) -> object:
    """The long form of a parameter."""
    return pytest.param(value, marks=[pytest.mark.soak, pytest.mark.timeout(timeout_s)])


@pytest.mark.parametrize("streams", [400, soak(20_000, 1200)])
async def test_RPC_07_cancelled_streams_leak_neither_memory_nor_places(streams: int) -> None:
    engine = FakeEngine(token_s=0.001, max_num_seqs=SIDE_BY_SIDE)
    request = rollout_pb2.GenerateRequest(
        tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
        sampling=sampling_to_wire(Sampling(n=2, max_tokens=1000)),
    )
    async with running(engine) as (worker, address), open_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)

        async def cancel_after_the_first_message(times: int) -> None:
            for _ in range(times):
                call = stub.Generate(request, timeout=60)
                assert (await call.read()).WhichOneof("event") == "prompt"
                call.cancel()

        async def cancel_many(times: int) -> int:
            async with asyncio.TaskGroup() as group:
                for _ in range(SIDE_BY_SIDE // 2):
                    group.create_task(cancel_after_the_first_message(times // (SIDE_BY_SIDE // 2)))
            await until(lambda: not worker.gate.load and not engine.stats().running, 30)
            return psutil.Process().memory_info().rss

        warm = await cancel_many(max(streams // 10, 200))
        grown = await cancel_many(streams) - warm
        print(f"{streams} cancelled streams: {grown / 1e6:+.1f} MB")
        assert grown < GROWTH_BYTES
        assert not worker.gate.inside


@pytest.mark.parametrize("cycles", [60, soak(2_000, 600)])
async def test_RPC_06_connections_leak_no_descriptors(cycles: int) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with running(FakeEngine()) as (_, address):
        host, _, port = address.rpartition(":")

        async def connect_and_call() -> None:
            async with RolloutClient.open(address) as client:
                await client.status()

        await connect_and_call()
        before = descriptors()
        for cycle in range(cycles):
            await connect_and_call()
            if cycle % 4 == 0:
                _, silent = await asyncio.open_connection(host, int(port))
                silent.close()
                await silent.wait_closed()
        await until(lambda: abs(descriptors() - before) <= 5, 60)


@pytest.mark.parametrize("cycles", [100, soak(10_000, 900)])
async def test_ASY_10_a_run_goes_on_after_however_many_pauses(tmp_path: Path, cycles: int) -> None:
    chance = random.Random(1)

    async def sometimes_slow(identity: Identity, answer: Generation) -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.002)))

    with world(tmp_path, steps=10**6, prompts_per_step=4, max_staleness=1, max_epochs=10**6) as w:
        w.rollout.behave = sometimes_slow
        running_on = asyncio.create_task(w.controller.run())
        for _ in range(cycles):
            w.controller.pause()
            await asyncio.sleep(chance.choice((0, 0, 0.0002, 0.001)))
            w.controller.resume()
            await asyncio.sleep(chance.choice((0, 0, 0.0002, 0.001)))
        step = w.controller.step
        await until(lambda: w.controller.step > step + 1, 30)
        w.controller.stop(checkpoint=False)
        assert await asyncio.wait_for(running_on, 10) is False
        counts = w.ledger.counts()
        assert (counts.in_flight, counts.lost, counts.consumed_twice) == (0, 0, 0)
