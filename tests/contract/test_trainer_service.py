"""The Trainer service over gRPC, by its client, around a real loop with fake services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import omnifleet
from omnifleet.auth import Scope, Tokens
from omnifleet.client.trainer import TrainerClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Generation, Identity
from omnifleet.wire import common_pb2, trainer_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.server import serving
from omnifleet_trainer.server.servicer import TrainerServicer
from tests.unit.loop_world import World, world

TOKENS = Tokens.generate()


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[World, TrainerClient, str]]:
    """A run that has not begun, and an operator's client of its service."""
    with world(folder, **settings) as w:
        servicer = TrainerServicer(
            w.controller, w.journal, folder / "ledger.sqlite", w.counters, {"backend": "fake"}
        )

        def register(server: Any) -> None:
            trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, server)

        async with serving("127.0.0.1:0", register, tokens=TOKENS, knob="trainer.listen") as address:
            async with TrainerClient.open(address, TOKENS.secret(Scope.OPERATOR)) as client:
                yield w, client, address


async def test_steps_are_streamed_live_and_end_with_the_run(tmp_path: Path) -> None:
    async with served(tmp_path, steps=4) as (w, client, _):
        seen: list[int] = []

        async def watch() -> None:
            async for report in client.steps():
                seen.append(report.step)
                assert report.version.number == report.step and report.version.run == "run"
                assert report.metrics["tmpe"] == 1.0

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(watch())
            group.create_task(w.controller.run())
        assert seen == [1, 2, 3, 4]
        late = [report.step async for report in client.steps(2, follow=False)]
        assert late == [3, 4]


async def test_status_and_ledger_speak_of_the_run(tmp_path: Path) -> None:
    async with served(tmp_path, steps=2) as (w, client, _):
        assert (await client.status()).state == "starting"
        await w.controller.run()
        status = await client.status()
        assert (status.state, status.step, status.facts["backend"]) == ("ended", 2, "fake")
        assert status.facts["weights"] == "run/lineage-0:2"
        counts = await client.ledger_counts()
        assert (counts.consumed, counts.consumed_twice, counts.steps, counts.in_flight) == (8, 0, 2, 0)
        rows = await client.ledger_rows(state="consumed", limit=3)
        assert [row.step for row in rows] == [1, 1, 1] and all(row.spans for row in rows)
        assert rows[0].identity.prompt_id.startswith("p")
        with pytest.raises(OmnifleetError) as refusal:
            await client.ledger_rows(state="eaten")
        assert refusal.value.reason is Reason.INVALID_REQUEST


async def test_pause_checkpoint_resume_and_stop(tmp_path: Path) -> None:
    async with served(tmp_path, steps=100_000) as (w, client, _):
        running = asyncio.create_task(w.controller.run())
        async for report in client.steps():
            if report.step == 2:
                break
        await client.pause("a look at it")
        path, step = await client.checkpoint(deadline_s=10)
        assert (await client.status()).state == "paused"
        assert path == str(tmp_path) and w.checkpoints[-1] == step >= 2
        await client.resume()
        async for report in client.steps(step):
            assert report.step == step + 1
            break
        await client.stop(checkpoint=True)
        assert await asyncio.wait_for(running, 10) is False
        assert w.checkpoints[-1] == w.controller.step


async def test_a_checkpoint_that_must_wait_too_long_says_so(tmp_path: Path) -> None:
    async with served(tmp_path) as (w, _, _):
        async with w.controller._policy_rests:
            with pytest.raises(OmnifleetError) as refusal:
                await w.controller.checkpoint(timeout=0.05)
        assert refusal.value.reason is Reason.DEADLINE and refusal.value.retryable


async def test_only_an_operator_may_steer(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, address):
        async with TrainerClient.open(address, TOKENS.secret(Scope.ENV)) as client:
            assert (await client.status()).state == "starting"
            for call in (client.pause, client.resume, client.checkpoint, client.stop):
                with pytest.raises(OmnifleetError) as refusal:
                    await call()
                assert refusal.value.reason is Reason.FORBIDDEN


async def test_handshake_refuses_another_contract(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, address):
        async with open_channel(address, TOKENS.secret(Scope.ENV)) as channel:
            stub = trainer_pb2_grpc.TrainerStub(channel)
            reply = await stub.Handshake(common_pb2.HandshakeRequest(contract=omnifleet.CONTRACT), timeout=5)
            assert reply.service == "trainer"
            with pytest.raises(Exception, match="v0"):
                await stub.Handshake(common_pb2.HandshakeRequest(contract="v0"), timeout=5)


async def test_a_dead_follower_does_not_hold_up_the_run(tmp_path: Path) -> None:
    async def patient(identity: Identity, answer: Generation) -> None:
        await asyncio.sleep(0.001)

    async with served(tmp_path, steps=6) as (w, client, _):
        w.rollout.behave = patient
        follower = asyncio.create_task(anext(client.steps()))
        running = asyncio.create_task(w.controller.run())
        await asyncio.wait_for(follower, 10)  # it read one report and never came back
        assert await asyncio.wait_for(running, 10)
