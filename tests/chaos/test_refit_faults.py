"""Refits under kills, hangs and races with three and more ranks: a worker serves nothing, or one committed version, whole."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from tests.refit_model import write_checkpoint
from tests.refit_processes import forkserver, run_receiver, run_sender
from tests.refit_world import DEADLINE_S, Receiving, Remote, Sender, receiving

pytestmark = pytest.mark.timeout(240)
STUCK_S = 4.0
"""Deadline of a round in which somebody hangs."""


@pytest.fixture(scope="module")
def spawner() -> Any:
    return forkserver()


async def said(pipe: Any, seconds: float = 120.0) -> Any:
    """The next message of a child."""
    async with asyncio.timeout(seconds):
        while not pipe.poll():  # noqa: ASYNC110  pipes tell no event
            await asyncio.sleep(0.01)
    return pipe.recv()


def kill(process: Any) -> None:
    process.kill()
    process.join(10)


@asynccontextmanager
async def remotes(
    spawner: Any, checkpoint: Path, count: int, *, first: int = 0, **settings: Any
) -> AsyncIterator[list[Remote]]:
    """Workers in processes of their own, numbered from `first`. settings: of `run_receiver`."""
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(first, first + count):
            ours, theirs = multiprocessing.Pipe()
            told = (str(checkpoint), f"w{number}", theirs)
            process = spawner.Process(target=run_receiver, args=told, kwargs=settings)
            process.start()
            theirs.close()
            stack.callback(kill, process)
            workers.append((f"w{number}", process, ours))
        ranks = len(settings.get("ranks", ("one",)))
        remote = []
        for name, process, pipe in workers:
            address = await said(pipe)
            client = await stack.enter_async_context(RefitClient.open(address))
            remote.append(Remote(name, process, client, pipe, ranks, address))
        yield remote


@asynccontextmanager
async def sender_at(
    spawner: Any, workers: Sequence[Any], step: int, phase: str, **settings: Any
) -> AsyncIterator[Any]:
    """A sender in a process of its own, that has come to a phase of its second refit; its pipe. It is killed in the end."""
    ours, theirs = multiprocessing.Pipe()
    addresses = {worker.id: worker.address for worker in workers}
    told = (addresses, step, phase, theirs)
    process = spawner.Process(target=run_sender, args=told, kwargs=settings)
    process.start()
    theirs.close()
    try:
        assert await said(ours) == phase
        yield ours
    finally:
        kill(process)


async def state(worker: Remote, message: object = True) -> tuple[bool, int, bool]:
    """(fenced, version's number, the property holds)."""
    worker.pipe.send(message)
    answer: tuple[bool, int, bool] = await said(worker.pipe)
    return answer


async def die_at(worker: Remote, place: str) -> float:
    """Kill a worker where it said that it stops; when, monotonic s."""
    assert await said(worker.pipe) == place
    now = time.monotonic()
    kill(worker.process)
    return now


class Hooked(list["torch.Tensor"]):
    """Buckets; `act` is called before the last one is sent."""

    def __init__(self, buckets: list[torch.Tensor], act: Callable[[], None]) -> None:
        super().__init__(buckets)
        self._act = act

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, bucket in enumerate(super().__iter__()):
            if number == len(self) - 1:
                self._act()
            yield bucket


async def cleared(worker: Any, digest: str = "") -> None:
    """Drop what is staged. A thread that is still meeting its group ends at its deadline; until then that is a conflict.

    digest: if it is nobody's, nothing is dropped, and a stage that runs is waited for.
    """
    async with asyncio.timeout(2 * DEADLINE_S):
        while True:
            try:
                await worker.client.abort(digest, reason="the sender is new")
                return
            except OmnifleetError as error:
                assert error.reason is Reason.CONFLICT and error.retryable, error
            await asyncio.sleep(0.1)


async def raced(sender: Sender, workers: Sequence[Receiving | Remote], step: int) -> int:
    """Publish beside another sender, whose refit may break ours off; how many committed ours."""
    outcomes = await sender.stage(workers, sender.pack(step))
    done = 0
    for worker in workers:
        outcome = outcomes[worker.id]
        try:
            if isinstance(outcome, OmnifleetError):
                raise outcome
            await worker.client.commit(outcome, InFlight.KEEP, deadline_s=DEADLINE_S)
            done += 1
        except OmnifleetError as error:
            assert error.reason in (
                Reason.CONFLICT,
                Reason.UNAVAILABLE,
                Reason.DEADLINE,
                Reason.REFIT_REJECTED,
            ), error
        assert not isinstance(worker, Receiving) or worker.whole()
    return done


@pytest.mark.parametrize("phase", ["packed", "broadcast", "staged", "committed one"])
async def test_a_sender_killed_in_any_phase_leaves_three_workers_whole_and_the_next_one_heals(
    spawner: Any, tmp_path: Path, phase: str
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        async with sender_at(spawner, workers, 5, phase):
            pass
        assert all(worker.whole() and not worker.fenced for worker in workers)
        at = sorted(worker.version.number for worker in workers)
        assert at == ([0, 0, 5] if phase == "committed one" else [0, 0, 0])
        successor = Sender("successor")
        for worker in workers:
            await cleared(worker)
        await successor.publish(workers, 6, whole=True)
        assert all(worker.holds(6) and worker.version.lineage == "successor" for worker in workers)
        successor.courier.close()


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.soak)])
async def test_NCL_08_a_sender_killed_while_other_groups_form_is_replaced_at_once(
    spawner: Any, tmp_path: Path, rounds: int
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 4) as workers:

        async def refit(worker: Receiving, step: int) -> None:
            sender = Sender("living")
            await sender.publish([worker], step, whole=True)
            sender.courier.close()

        async def kill_and_replace(worker: Receiving, step: int) -> None:
            async with sender_at(spawner, [worker], 100 + step, "broadcast"):
                pass
            assert worker.whole() and worker.version.lineage == "killed broadcast"
            await cleared(worker)
            await refit(worker, step)

        for step in range(rounds):
            victim = workers[step % len(workers)]
            others = [refit(worker, step) for worker in workers if worker is not victim]
            await asyncio.gather(kill_and_replace(victim, step), *others)
            assert all(worker.holds(step) and worker.version.lineage == "living" for worker in workers)


@pytest.mark.parametrize("phase", ["before", "broadcast", "staged", "gate"])
async def test_NCL_01_a_receiver_killed_in_any_phase_is_left_out_and_the_others_commit(
    spawner: Any, tmp_path: Path, phase: str
) -> None:
    async with remotes(spawner, write_checkpoint(tmp_path / "c"), 3) as workers:
        sender, victim = Sender(), workers[1]
        await sender.publish(workers, 0)
        shipment = sender.pack(1)
        if phase == "before":
            kill(victim.process)
        killed = Hooked(
            sender.buckets(shipment), lambda: kill(victim.process) if phase == "broadcast" else None
        )
        outcomes = await sender.stage(workers, shipment, killed)
        if phase == "staged":
            kill(victim.process)
        dying = None
        if phase == "gate":
            assert await state(victim, "stop at commit") == (False, 0, True)
            dying = asyncio.create_task(die_at(victim, "in its gate"))
        committed = []
        for worker in workers:
            outcome = outcomes[worker.id]
            try:
                if isinstance(outcome, OmnifleetError):
                    raise outcome
                deadline_s = 5.0 if worker is victim else DEADLINE_S
                await worker.client.commit(outcome, InFlight.KEEP, deadline_s=deadline_s)
                committed.append(worker.id)
            except OmnifleetError as error:
                assert worker is victim and error.reason in (Reason.UNAVAILABLE, Reason.DEADLINE), error
        if dying is not None:
            await dying
        assert committed == ["w0", "w2"]
        assert [await state(w) for w in workers if w is not victim] == [(False, 1, True)] * 2
        sender.courier.close()


async def test_a_receiver_that_hangs_costs_the_others_a_deadline_and_catches_up_alone(
    spawner: Any, tmp_path: Path
) -> None:
    async with remotes(spawner, write_checkpoint(tmp_path / "c"), 3) as workers:
        sender, victim = Sender(), workers[2]
        await sender.publish(workers, 0)
        shipment = sender.pack(1)
        os.kill(victim.process.pid, signal.SIGSTOP)
        outcomes = await sender.stage(workers, shipment, deadline_s=STUCK_S)
        assert [isinstance(outcomes[w.id], str) for w in workers] == [True, True, False]
        for worker in workers[:2]:
            await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
        os.kill(victim.process.pid, signal.SIGCONT)
        assert await state(victim) == (False, 0, True)
        await victim.client.abort(reason="catch up")
        alone = sender.pack(1, whole=True)
        outcome = (await sender.stage([victim], alone))[victim.id]
        await victim.client.commit(str(outcome), InFlight.KEEP, deadline_s=DEADLINE_S)
        assert [await state(w) for w in workers] == [(False, 1, True)] * 3
        sender.courier.close()


async def test_a_load_that_breaks_half_way_fences_until_a_complete_refit(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3, planned=False) as workers:
        sender, victim = Sender(), workers[0]
        await sender.publish(workers, 0)
        victim.engine.break_at_load = True
        shipment = sender.pack(1)
        outcomes = await sender.stage(workers, shipment)
        with pytest.raises(OmnifleetError) as caught:
            await victim.client.commit(str(outcomes["w0"]), InFlight.KEEP, deadline_s=DEADLINE_S)
        assert caught.value.reason is Reason.FENCED and victim.fenced
        for worker in workers[1:]:
            await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
            assert worker.holds(1)
        victim.engine.break_at_load = False
        refused = (await sender.stage([victim], sender.pack(1)))["w0"]
        assert isinstance(refused, OmnifleetError) and "complete refit" in refused.message
        whole = sender.pack(1, whole=True)
        outcome = (await sender.stage([victim], whole))["w0"]
        await victim.client.commit(str(outcome), InFlight.KEEP, deadline_s=DEADLINE_S)
        assert victim.holds(1)
        sender.courier.close()


async def test_two_refits_that_race_leave_every_worker_at_one_of_them_whole(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        one, two = Sender("one"), Sender("two")
        for step in range(4):
            await asyncio.gather(raced(one, workers, step), raced(two, workers, 10 + step))
            assert all(worker.whole() and not worker.fenced for worker in workers)
        for sender in (one, two):
            sender.courier.close()
        for worker in workers:
            await cleared(worker)
        last = Sender("last")
        await last.publish(workers, 20, whole=True)
        assert all(worker.holds(20) for worker in workers)
        last.courier.close()
