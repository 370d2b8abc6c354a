"""Kills while a worker takes a refit straight into place: it is fenced until whole, and the others are not touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from tests.chaos.test_refit_faults import Hooked, cleared, kill, remotes, sender_at, spawner, state
from tests.refit_model import write_checkpoint
from tests.refit_world import DEADLINE_S, Sender, receiving
from tests.waiting import until

__all__ = ["spawner"]
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("packed", marks=pytest.mark.soak),
        pytest.param("opened", marks=pytest.mark.soak),
        "broadcast",
        pytest.param("staged", marks=pytest.mark.soak),
    ],
)
async def test_a_sender_killed_in_any_phase_leaves_it_fenced_or_whole_and_the_next_one_heals(
    spawner: Any, tmp_path: Path, phase: str
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        victim, *others = workers
        victim.engine.limit_shadow(0)
        async with sender_at(spawner, workers, 5, phase, in_place=True):
            pass
        assert all(worker.holds(0) for worker in others), "what is staged is not committed"
        if phase in ("opened", "broadcast"):
            await until(lambda: not victim.receiver.receiving)
            assert victim.fenced and ":5" in victim.standing.fence
        else:
            assert victim.holds(0 if phase == "packed" else 5)
        successor = Sender("successor")
        successor.in_place = InFlight.KEEP
        for worker in workers:
            await cleared(worker)
        await successor.publish(workers, 6, whole=True)
        assert all(worker.holds(6) and worker.version.lineage == "successor" for worker in workers)
        successor.courier.close()


async def test_a_worker_killed_half_way_costs_the_others_nothing_and_a_new_one_takes_it_whole(
    spawner: Any, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        remotes(spawner, checkpoint, 1) as (other,),
        remotes(spawner, checkpoint, 2, first=1, shadow=0) as (victim, newcomer),
    ):
        sender = Sender()
        sender.in_place = InFlight.KEEP
        await sender.publish([other], 1, whole=True)
        whole = sender.pack(1, whole=True)
        killed = Hooked(sender.buckets(whole), lambda: kill(victim.process))
        outcome = (await sender.stage([victim], whole, killed))["w1"]
        assert isinstance(outcome, OmnifleetError) and outcome.reason is Reason.UNAVAILABLE
        outcome = (await sender.stage([newcomer], whole))["w2"]
        assert await state(newcomer) == (False, 1, True), "it serves before it is told to commit"
        await newcomer.client.commit(str(outcome), InFlight.KEEP, deadline_s=DEADLINE_S)
        assert await state(other) == (False, 1, True)
        sender.courier.close()
