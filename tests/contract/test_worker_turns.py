"""A worker whose engine gives its device to the trainer and takes it back, over real gRPC with the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from omnifleet.auth import OPEN
from omnifleet.client.rollout import RolloutClient
from omnifleet.client.turns import TurnsClient
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Generation, Identity, Sampling, VersionBound
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import version_from_wire
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.worker.command import Worker
from tests.contract.test_worker_refit import Sender, write_transfer

WHO = Identity(run="test")
TOKENS = 12


@dataclass
class Scene:
    """A worker and those who speak to it."""

    engine: FakeEngine
    worker: Worker
    rollout: RolloutClient
    turns: TurnsClient
    sender: Sender
    shm: Path

    async def ask(self, bound: VersionBound = VersionBound(), deadline_s: float = 30.0) -> Generation:
        return await self.rollout.generate(
            prompt_token_ids=[10, 11, 12],
            sampling=Sampling(max_tokens=TOKENS, temperature=0.0),
            identity=WHO,
            bound=bound,
            deadline_s=deadline_s,
        )

    async def refit(self, number: int, **settings: object) -> refit_pb2.CommitReply:
        digest = await self.sender.stage(write_transfer(self.shm, number, **settings), self.shm)  # type: ignore[arg-type]
        return await self.sender.commit(digest, refit_pb2.RECOMPUTE)

    async def begun(self, tokens: int = 3) -> None:
        """Return once the engine has made some tokens."""
        while self.worker.counters.count("tokens_generated") < tokens:  # noqa: ASYNC110 - a counter tells nobody
            await asyncio.sleep(0.005)


@asynccontextmanager
async def scene(shm: Path, token_s: float = 0.02) -> AsyncIterator[Scene]:
    engine = FakeEngine(token_s=token_s)
    await engine.start()
    worker = Worker(engine, "worker-0", RolloutConfig(), OPEN)
    async with (
        serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="listen", grace_s=0.2) as address,
        open_channel(address) as channel,
        RolloutClient.open(address) as rollout,
        TurnsClient.open(address) as turns,
    ):
        yield Scene(engine, worker, rollout, turns, Sender(refit_pb2_grpc.RefitStub(channel)), shm)


@pytest.mark.parametrize("level", [0, 1])
async def test_a_running_reply_goes_on_after_the_sleep_with_what_it_had(shm: Path, level: int) -> None:
    async with scene(shm, token_s=0.0) as w:
        whole = (await w.ask()).samples[0].token_ids
    async with scene(shm) as w:
        asking = asyncio.create_task(w.ask())
        await w.begun()
        assert await w.turns.sleep(level, deadline_s=10) == 1
        made = w.worker.counters.count("tokens_generated")
        late = asyncio.create_task(w.ask())  # who comes while it sleeps waits
        await w.turns.wake(weights_only=True, deadline_s=10)
        assert (await w.refit(1)).version.number == 1
        assert w.worker.counters.count("tokens_generated") == made and not asking.done()
        assert (await w.turns.wake(deadline_s=10)).number == 1
        old, new = await asking, await late
        assert old.samples[0].token_ids == new.samples[0].token_ids == whole
        assert [span.version.number for span in old.samples[0].spans] == [0, 1]
        assert {span.version.number for span in new.samples[0].spans} == {1}
        assert w.engine.alive() and w.worker.counters.count("refits") == 1


async def test_weights_that_sleep_take_no_refit_until_they_are_woken(shm: Path) -> None:
    async with scene(shm) as w:
        await w.turns.sleep(1, deadline_s=10)
        with pytest.raises(OmnifleetError) as refused:
            await w.refit(1)
        assert refused.value.reason is Reason.CONFLICT and refused.value.retryable
        await w.turns.wake(weights_only=True, deadline_s=10)
        assert (await w.refit(1)).version.number == 1


async def test_the_deepest_sleep_fences_until_a_complete_refit(shm: Path) -> None:
    async with scene(shm, token_s=0.0) as w:
        base = (await w.refit(1)).version
        await w.turns.sleep(2, deadline_s=10)
        await w.turns.wake(weights_only=True, deadline_s=10)
        with pytest.raises(OmnifleetError) as refused:
            await w.refit(2, parent=version_from_wire(base))
        assert refused.value.reason is Reason.REFIT_REJECTED
        await w.turns.wake(deadline_s=10)
        with pytest.raises(OmnifleetError) as fenced:
            await w.ask()
        assert fenced.value.reason is Reason.FENCED
        await w.refit(2)
        assert len((await w.ask()).samples[0].token_ids) == TOKENS
        assert len(w.engine.weights) == 3


async def test_an_exact_bound_ends_where_the_sleep_begins(shm: Path) -> None:
    async with scene(shm) as w:
        exact = VersionBound(exact=w.worker.standing.version)
        asking = asyncio.create_task(w.ask(exact))
        await w.begun()
        await w.turns.sleep(1, deadline_s=10)
        failure = (await asking).failures[0]
        assert isinstance(failure, OmnifleetError)
        assert failure.reason is Reason.VERSION_MOVED and failure.retryable


async def test_weights_that_are_being_read_are_not_taken_away(shm: Path) -> None:
    async with scene(shm, token_s=0.0) as w:
        with w.worker.receiver.rest.reading():
            with pytest.raises(OmnifleetError) as refused:
                await w.turns.sleep(1, deadline_s=10)
        assert refused.value.reason is Reason.CONFLICT and refused.value.retryable
        await w.turns.sleep(1, deadline_s=10)
        with pytest.raises(OmnifleetError, match="wake them first"), w.worker.receiver.rest.reading():
            pass


async def test_sleep_and_wake_are_idempotent_and_a_half_woken_engine_sleeps_again(shm: Path) -> None:
    async with scene(shm, token_s=0.0) as w:
        await w.turns.wake(deadline_s=10)
        for _ in range(2):
            await w.turns.sleep(1, deadline_s=10)
        await w.turns.wake(weights_only=True, deadline_s=10)  # here a trainer died
        await w.turns.sleep(1, deadline_s=10)
        with pytest.raises(OmnifleetError):
            await w.refit(1)
        for _ in range(2):
            await w.turns.wake(deadline_s=10)
        assert len((await w.ask()).samples[0].token_ids) == TOKENS
        with pytest.raises(OmnifleetError, match="sleep level 3"):
            await w.turns.sleep(3, deadline_s=10)


async def test_an_engine_that_cannot_sleep_serves_on_and_a_late_request_runs_into_its_deadline(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(shm, token_s=0.0) as w:

        async def refuse(level: int) -> None:
            raise OmnifleetError(Reason.ENGINE_ERROR, "no", retryable=True)

        with monkeypatch.context() as broken:
            broken.setattr(w.engine, "sleep", refuse)
            with pytest.raises(OmnifleetError, match="no"):
                await w.turns.sleep(1, deadline_s=10)
        assert len((await w.ask()).samples[0].token_ids) == TOKENS
        await w.turns.sleep(1, deadline_s=10)
        with pytest.raises(OmnifleetError) as late:
            await w.ask(deadline_s=0.2)
        assert late.value.reason is Reason.DEADLINE
