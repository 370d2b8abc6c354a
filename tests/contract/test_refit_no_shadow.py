"""Workers without room for a shadow: fenced while they take a refit straight into place, and until that is whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.auth import Scope, Tokens
from omnifleet.client.rollout import RolloutClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Identity, InFlight, Sampling
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.guard import Canary, Guard
from omnifleet_trainer.refit.sender import RefitSender
from tests.contract.gateway_world import world
from tests.contract.test_refit_peers import ready
from tests.refit_model import MOVES, expected, scores, tensors, write_checkpoint
from tests.refit_processes import joined
from tests.refit_registry import Registry
from tests.refit_world import CPU, Receiving, receiving
from tests.waiting import beside, until

TRANSPORTS = ["nccl", "shm"]


@asynccontextmanager
async def fleet_of(
    tmp_path: Path,
    transport: str,
    count: int,
    *,
    planned: bool = True,
    ranks: Any = ((0, 2),),
    **settings: Any,
) -> AsyncIterator[tuple[RefitSender, list[Receiving], Registry]]:
    registry = Registry()
    options: dict[str, Any] = {"run": "r", "lineage": "l", "in_flight": InFlight.KEEP, "timeout_s": 20.0}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(registry.served())
        workers = await stack.enter_async_context(
            receiving(write_checkpoint(tmp_path / "c"), count, planned=planned, ranks=ranks)
        )
        registry.workers = {worker.id: worker for worker in workers}
        if transport == "shm":
            files = FileSender.open(address, "", **(options | settings))
            yield await stack.enter_async_context(files), workers, registry
            return
        options |= {"device": CPU, "host": "127.0.0.1", "device_bucket_bytes": 512}
        group = BroadcastSender.connect(address, "", **(options | settings))
        yield await stack.enter_async_context(group), workers, registry


async def publish(sender: RefitSender, step: int) -> Any:
    return await sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)


def watched(worker: Receiving, see: Callable[[], None]) -> None:
    """Have `see` called whenever the worker begins to take something in place."""
    stage = worker.engine.stage

    async def seen(manifest_json: str, source: str, *, in_place: bool = False) -> int:
        if in_place:
            see()
        return await stage(manifest_json, source, in_place=in_place)

    worker.engine.stage = seen  # type: ignore[method-assign]


@pytest.mark.parametrize("planned", [True, False], ids=["plan", "loader"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_without_room_is_fenced_after_the_others_and_holds_the_same_bytes(
    tmp_path: Path, transport: str, planned: bool
) -> None:
    async with fleet_of(tmp_path, transport, 3, planned=planned) as (sender, workers, _):
        first, victim, third = workers
        victim.engine.limit_shadow(0)
        seen: list[tuple[bool, list[bool]]] = []
        watched(victim, lambda: seen.append((victim.fenced, [first.fenced, third.fenced])))
        for step in range(3):
            report = await publish(sender, step)
            assert report.ok == ("w0", "w1", "w2"), report.failed
            assert all(worker.holds(step) for worker in workers)
            assert not (await victim.client.describe()).shadow and (await first.client.describe()).shadow
        assert seen == [(True, [False, False])] * 3
        assert victim.counters.count("refits_in_place") == 3 and victim.counters.count("refits") == 3
        assert victim.engine.by_plan == [False, planned, planned], "the first one checks the plan"
        victim.engine.limit_shadow(None)
        assert (await publish(sender, 3)).ok == ("w0", "w1", "w2") and victim.holds(3)
        assert victim.counters.count("refits_in_place") == 3 and (await victim.client.describe()).shadow


async def test_of_two_ranks_one_has_room_and_both_take_it_in_place(tmp_path: Path) -> None:
    both = ((0, 2), (1, 2))
    async with fleet_of(tmp_path, "nccl", 2, ranks=both) as (sender, workers, _):
        other, victim = workers
        for stager in victim.engine.stagers[:1]:
            stager._reception.memory.limit = 0
        for step in range(3):
            report = await publish(sender, step)
            assert report.ok == ("w0", "w1"), report.failed
            assert victim.holds(step) and other.holds(step)
        assert victim.counters.count("refits_in_place") == 3 and not victim.standing.shadow
        assert victim.engine.by_plan == [False, True, True]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_no_two_are_fenced_at_once_and_the_whole_fleet_comes_through(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport, 3) as (sender, workers, _):
        fenced: list[int] = []
        for worker in workers:
            worker.engine.limit_shadow(0)
            watched(worker, lambda: fenced.append(sum(one.fenced for one in workers)))
        for step in range(2):
            assert (await publish(sender, step)).ok == ("w0", "w1", "w2")
            assert all(worker.holds(step) for worker in workers)
        assert fenced == [1] * 6


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_may_not_be_fenced_serves_the_old_version_and_says_why(
    tmp_path: Path, transport: str
) -> None:
    async with fleet_of(tmp_path, transport, 2, without_shadow="refuse") as (sender, workers, registry):
        await publish(sender, 0)
        victim = workers[1]
        victim.engine.limit_shadow(0)
        for step in (1, 2):
            report = await publish(sender, step)
            assert report.ok == ("w0",) and "no_room" in report.failed["w1"]
            assert "refit.without_shadow" in report.failed["w1"] and victim.holds(0)
        # Who serves nothing anyway has nothing to lose.
        await victim.client.quarantine("a test said so")
        async with beside(sender.keep_up()):

            def healed() -> bool:
                registry.moved()
                return victim.holds(2)

            await until(healed)


async def test_a_load_that_breaks_in_place_fences_and_the_engine_goes_on_after_the_next(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, "nccl", 2, planned=False) as (sender, workers, registry):
        await publish(sender, 0)
        victim = workers[1]
        victim.engine.limit_shadow(0)
        victim.engine.break_at_load = True
        report = await publish(sender, 1)
        assert report.ok == ("w0",) and "half-way" in report.failed["w1"] and victim.fenced
        victim.engine.break_at_load = False
        async with beside(sender.keep_up()):

            def healed() -> bool:
                registry.moved()
                return victim.holds(1)

            await until(healed)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_that_its_canary_tells_against_is_put_back_in_place(tmp_path: Path, transport: str) -> None:
    async with fleet_of(tmp_path, transport, 2) as (sender, workers, _):
        step, victim = 0, workers[1]
        victim.engine.limit_shadow(0)
        victim.engine.spoiled = {1}

        class Told(Guard):
            async def difference(self, worker: Any, number: int) -> float:
                one = next(w for w in workers if w.id == worker.id)
                ours = scores(dict(one.engine.model.state_dict()), (3, 4))
                return max(abs(a - b) for a, b in zip(ours, self._expected[number], strict=True))

        async def expect(batch: Any) -> list[float]:
            return scores(expected(step), (3, 4))

        sender.guard = Told(Canary((1,), (3, 4), 1e-6), "", expect)
        assert (await publish(sender, 0)).ok == ("w0", "w1")
        step = 1
        report = await publish(sender, 1)
        assert report.ok == ("w0",) and "again" in report.failed["w1"], report.failed
        assert victim.holds(0) and "put back" in victim.standing.note
        assert victim.counters.count("refits_rolled_back") == 1
        step = 2
        assert (await publish(sender, 2)).failed.keys() <= {"w1"}  # by file it catches up alone


async def test_one_that_is_behind_and_fenced_takes_it_from_a_peer_in_place(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    checkpoint = write_checkpoint(tmp_path / "c")
    async with world(tmp_path, tokens=tokens, heartbeat_s=0.2) as here, AsyncExitStack() as stack:
        first = await stack.enter_async_context(joined(checkpoint, "first", here.address, tokens))
        await ready(here, 1)
        files = FileSender.open(here.address, tokens.secret(Scope.TRAINER), run="r", lineage="l")
        async with files as sender:
            await publish(sender, 0)
            late = await stack.enter_async_context(joined(checkpoint, "late", here.address, tokens))
            late.engine.limit_shadow(0)
            late.standing.raise_fence("a test said so")
            await ready(here, 2)
            assert late.holds(0) and late.version == first.version
            assert late.counters.count("refits_in_place") == late.counters.count("catch_ups_from_peers") == 1


@pytest.mark.parametrize("ends", ["whole", "broken"])
async def test_requests_meanwhile_are_refused_there_and_complete_on_another_worker(
    tmp_path: Path, ends: str
) -> None:
    tokens = Tokens.generate()
    checkpoint, secret = write_checkpoint(tmp_path / "c"), tokens.secret(Scope.TRAINER)
    async with world(tmp_path, tokens=tokens, heartbeat_s=0.2) as here, AsyncExitStack() as stack:
        victim = await stack.enter_async_context(joined(checkpoint, "victim", here.address, tokens))
        await ready(here, 1)
        sender = await stack.enter_async_context(
            FileSender.open(here.address, secret, run="r", lineage="l", in_flight=InFlight.KEEP)
        )
        await publish(sender, 0)
        gateway = await stack.enter_async_context(RolloutClient.open(here.address, secret))
        direct = await stack.enter_async_context(RolloutClient.open(victim.address, secret))
        victim.engine.token_s = 0.01
        sampling = Sampling(max_tokens=100, ignore_eos=True, temperature=0.0)

        def ask(client: RolloutClient) -> asyncio.Task[Any]:
            call = client.generate(
                prompt_token_ids=[10, 11], sampling=sampling, identity=Identity(run="r"), deadline_s=60.0
            )
            return asyncio.create_task(call)

        running = ask(gateway)
        await until(lambda: any(flight.tokens for flight in victim.gate.inside))
        other = await stack.enter_async_context(joined(checkpoint, "other", here.address, tokens))
        await ready(here, 2)
        assert other.holds(0)
        begun, go_on, stage = asyncio.Event(), asyncio.Event(), victim.engine.stage

        async def slow(manifest_json: str, source: str, *, in_place: bool = False) -> int:
            if in_place:
                begun.set()
                await go_on.wait()
                if ends == "broken":
                    raise OmnifleetError(Reason.REFIT_REJECTED, "bucket 1 does not match its checksum")
            return await stage(manifest_json, source, in_place=in_place)

        victim.engine.stage = slow  # type: ignore[method-assign]
        victim.engine.limit_shadow(0)
        publishing = asyncio.create_task(publish(sender, 1))
        await begun.wait()
        assert victim.fenced and victim.gate.inside, "what runs stands still"
        with pytest.raises(OmnifleetError) as caught:
            await ask(direct)
        assert caught.value.reason is Reason.FENCED and caught.value.retryable
        assert "without a shadow" in caught.value.message
        meanwhile = await ask(gateway)
        sample = meanwhile.samples[0]
        assert len(sample.token_ids) == 100 and {span.worker for span in sample.spans} == {other.id}
        go_on.set()
        report = await publishing
        sample = (await running).samples[0]
        assert len(sample.token_ids) == 100
        by = [(span.worker, span.version.number) for span in sample.spans]
        if ends == "whole":
            assert not report.failed and victim.holds(1) and by == [(victim.id, 0), (victim.id, 1)]
        else:
            assert list(report.failed) == [victim.id] and victim.fenced
            assert by == [(victim.id, 0), (other.id, 1)], "from its exact tokens"
