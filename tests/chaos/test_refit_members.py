"""Members that come and go where no group tells of a death, as with NCCL: only deadlines, calls and aborts do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet_refit.windows import needs_of
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.courier import Leg, Order
from omnifleet_trainer.refit.parts import Cut
from tests import refit_model
from tests.chaos.test_refit_faults import Hooked, cleared, kill, remotes, spawner, state
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_processes import deafen
from tests.refit_world import CPU, DEADLINE_S, Remote, Sender, receiving

__all__ = ["spawner"]
pytestmark = pytest.mark.timeout(240)
HIDDEN = 64
TWO = ((0, 2), (1, 2))
SHORT_S = 1.0
"""Deadline of a round that does not end."""


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our groups are deaf, and matrices large enough to be cut."""
    deafen(monkeypatch.setattr)
    monkeypatch.setattr(refit_model, "HIDDEN", HIDDEN)
    yield


async def committed(workers: list[Remote], outcomes: dict[str, Any], victim: Remote) -> list[str]:
    """Ids of those that commit what they staged; the victim may fail."""
    done = []
    for worker in workers:
        try:
            if isinstance(outcomes[worker.id], OmnifleetError):
                raise outcomes[worker.id]
            await worker.client.commit(outcomes[worker.id], InFlight.KEEP, deadline_s=DEADLINE_S)
            done.append(worker.id)
        except OmnifleetError as error:
            assert worker is victim, error
    return done


async def test_a_death_that_no_group_tells_of_costs_the_others_a_round_and_a_newcomer_makes_a_new_group(
    spawner: Any, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with AsyncExitStack() as stack:
        told = {"deaf": True, "hidden": HIDDEN}
        workers = await stack.enter_async_context(remotes(spawner, checkpoint, 3, **told))
        sender, victim, names = Sender(), workers[1], []
        await sender.publish(workers, 0)
        names.append(sender.courier._name)
        shipment = sender.pack(1)
        killed = Hooked(sender.buckets(shipment), lambda: kill(victim.process))
        outcomes = await sender.stage(workers, shipment, killed)
        assert await committed(workers, outcomes, victim) == ["w0", "w2"]
        sender.took(shipment)
        names.append(sender.courier._name)
        left = [workers[0], workers[2]]
        assert [await state(worker) for worker in left] == [(False, 1, True)] * 2
        left += await stack.enter_async_context(remotes(spawner, checkpoint, 1, first=3, **told))
        await sender.publish(left, 2, whole=True)
        names.append(sender.courier._name)
        assert [await state(worker) for worker in left] == [(False, 2, True)] * 3
        await sender.publish(left, 3)
        names.append(sender.courier._name)
        assert [await state(worker) for worker in left] == [(False, 3, True)] * 3
        assert len(set(names)) == 3 and names[2] == names[3], "kept while the members stay, never used twice"
        sender.courier.close()


async def test_a_group_that_receivers_left_when_their_time_was_up_is_not_used_again(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2) as workers:
        sender = Sender()
        await sender.publish(workers, 0)
        shipment = sender.pack(1)
        orders = {worker.id: Order(worker.client, shipment) for worker in workers}
        buckets = sender.buckets(shipment)
        late = await sender.courier._round(orders, [Leg(buckets[:-1])], SHORT_S)
        reasons = {outcome.reason for outcome in late.values() if isinstance(outcome, OmnifleetError)}
        assert len(late) == 2 and reasons <= {Reason.DEADLINE, Reason.UNAVAILABLE}
        for worker in workers:
            await cleared(worker)
            assert worker.holds(0)
        outcomes = await sender.courier._round(orders, [Leg(buckets)], DEADLINE_S)
        assert outcomes == dict.fromkeys(orders, shipment.version.manifest_digest)
        sender.courier.close()


@pytest.mark.soak
async def test_an_engine_of_two_ranks_killed_between_its_parts_is_left_out_and_the_others_commit(
    spawner: Any, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with remotes(spawner, checkpoint, 3, deaf=True, hidden=HIDDEN, ranks=TWO) as workers:
        sender, victim = Sender(), workers[1]
        first = await sender.publish(workers, 0)
        _, bodies = await workers[0].client.needs()
        needs = [needs_of(body) for body in bodies]
        held = dict(sender.digests)
        sender.snapshot.pack(tensors(1).items(), MOVES)
        takers = {worker.id: Taker(first.version, held, False) for worker in workers}
        chosen = choose(sender.snapshot, WeightVersion("r", "l", 1), takers, needs, False)
        parts = chosen["w0"].parts
        assert [part.ranks for part in parts] == [(0,), (0, 1), (1,)]
        cuts: list[Any] = [list(Cut(part, sender.snapshot, CPU)) for part in parts]
        cuts[1] = Hooked(cuts[1], lambda: kill(victim.process))
        legs = [Leg(cut, part.ranks) for cut, part in zip(cuts, parts, strict=True)]
        orders = {worker.id: Order(worker.client, chosen[worker.id], 2) for worker in workers}
        outcomes = await sender.courier.stage_legs(orders, legs, DEADLINE_S)
        assert await committed(workers, outcomes, victim) == ["w0", "w2"]
        assert [await state(worker) for worker in workers if worker is not victim] == [(False, 1, True)] * 2
        sender.courier.close()
