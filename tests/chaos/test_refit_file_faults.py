"""Refits by file under kills and races with three workers: a worker serves nothing, or one committed version, whole."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet_trainer.refit.transfer import sweep
from tests.chaos.test_refit_faults import die_at, kill, remotes, said, spawner, state
from tests.refit_files import FileSender, run_file_sender, shared_folder
from tests.refit_model import write_checkpoint
from tests.refit_world import DEADLINE_S, Receiving, receiving

__all__ = ["spawner"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


async def killed_at(spawner: Any, workers: Sequence[Receiving], folder: Path, step: int, phase: str) -> None:
    """Send by a process of its own, which is killed where its second refit has come to a phase."""
    ours, theirs = multiprocessing.Pipe()
    addresses = {worker.id: worker.address for worker in workers}
    process = spawner.Process(target=run_file_sender, args=(addresses, str(folder), step, phase, theirs))
    process.start()
    theirs.close()
    try:
        assert await said(ours) == phase
    finally:
        kill(process)


@pytest.mark.parametrize("phase", ["written", "staged one", "committed one"])
async def test_a_sender_killed_beside_its_files_leaves_three_workers_whole_and_the_next_one_heals(
    spawner: Any, tmp_path: Path, folder: Path, phase: str
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        await killed_at(spawner, workers, folder, 5, phase)
        assert all(worker.whole() and not worker.fenced for worker in workers)
        at = [worker.version.number for worker in workers]
        assert at == ([5, 0, 0] if phase == "committed one" else [0, 0, 0])
        assert len(sweep(folder)) == 2 and not os.listdir(folder), "files of the dead are known as such"
        successor = FileSender("successor", folder)
        await successor.publish(workers, 6)
        assert all(worker.holds(6) and worker.version.lineage == "successor" for worker in workers)
        successor.close()


@pytest.mark.parametrize("phase", ["staged", "gate"])
async def test_a_receiver_killed_over_a_file_does_not_touch_the_others_and_a_new_one_takes_the_same_file(
    spawner: Any, tmp_path: Path, folder: Path, phase: str
) -> None:
    async with remotes(spawner, write_checkpoint(tmp_path / "c"), 4) as (*workers, newcomer):
        sender, victim = FileSender("l", folder), workers[1]
        await sender.publish(workers, 0)
        parcel = sender.pack(1)
        digests = {worker.id: await sender.stage(worker, parcel) for worker in workers}
        dying = None
        if phase == "staged":
            kill(victim.process)
        else:
            assert await state(victim, "stop at commit") == (False, 0, True)
            dying = asyncio.create_task(die_at(victim, "in its gate"))
        for worker in workers:
            digest, deadline_s = digests[worker.id], 5.0 if worker is victim else DEADLINE_S
            try:
                await worker.client.commit(digest, InFlight.KEEP, deadline_s=deadline_s)
                assert worker is not victim
            except OmnifleetError as error:
                assert worker is victim and error.reason in (Reason.UNAVAILABLE, Reason.DEADLINE), error
        if dying is not None:
            await dying
        await sender.send(newcomer, parcel)
        left = [workers[0], workers[2], newcomer]
        assert [await state(worker) for worker in left] == [(False, 1, True)] * 3
        sender.close()


async def raced(sender: FileSender, workers: Sequence[Receiving], step: int) -> int:
    """Publish beside another sender, which may come in between; how many committed ours."""
    parcel, done = sender.pack(step), 0
    for worker in workers:
        try:
            await sender.send(worker, parcel)
            done += 1
        except OmnifleetError as error:
            assert error.reason in (Reason.CONFLICT, Reason.REFIT_REJECTED), error
        assert worker.whole()
    return done


async def test_two_files_that_race_leave_every_worker_at_one_of_them_whole(
    tmp_path: Path, folder: Path
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        one, two = FileSender("one", folder), FileSender("two", folder)
        for step in range(4):
            done = await asyncio.gather(raced(one, workers, step), raced(two, workers, 10 + step))
            assert sum(done) >= len(workers), "a file gives way to another one alone"
            assert all(worker.whole() and not worker.fenced for worker in workers)
            assert {worker.version.number for worker in workers} <= {step, 10 + step}
        last = FileSender("last", folder)
        await last.publish(workers, 20)
        assert all(worker.holds(20) for worker in workers)
        for sender in (one, two, last):
            sender.close()
