"""Refits over NCCL between two GPUs under faults: the receiver serves nothing, or one committed version, whole.

Light engines (`tests/refit_world.py`), no vLLM. The sender is on the first GPU, one receiver on the second in a process of
its own, kept from test to test until a test kills it. NCCL tells nobody of a death: whoever waits for the dead is freed by
its deadline or by an abort. Each test prints a row: the fault, seconds until who is left is free, how it ended.

Run: python -m pytest tests/gpu/test_refit_faults_gpu.py -m gpu -s
With OMNIFLEET_REHEARSED=1 the same tests run without GPUs, over gloo groups that hide deaths: a check of this file alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet_trainer.refit.courier import Leg, Order, Outcome
from omnifleet_trainer.refit.snapshot import Shipment
from tests.chaos.test_refit_faults import (
    Hooked,
    cleared,
    die_at,
    kill,
    raced,
    remotes,
    said,
    sender_at,
    spawner,
    state,
)
from tests.refit_damage import MANIFESTS, changed, damaged
from tests.refit_model import write_checkpoint
from tests.refit_processes import settle
from tests.refit_world import DEADLINE_S, Remote, Sender

__all__ = ["spawner"]
REHEARSED = "OMNIFLEET_REHEARSED" in os.environ
SENDER, RECEIVER = ("cpu", "cpu") if REHEARSED else ("cuda:0", "cuda:1")
SETTINGS: dict[str, Any] = {"deaf": REHEARSED, "hidden": 512}
STUCK_S = 3.0
"""Deadline of a stage that somebody does not live to see the end of."""
NOBODYS = "of nobody's manifest"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not REHEARSED and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@dataclass
class Place:
    """Where a receiver runs: one at a time."""

    spawner: Any
    checkpoint: Path
    stack: AsyncExitStack
    joined: list[Remote] = field(default_factory=list)

    async def receiver(self) -> Remote:
        """Whoever receives; a newcomer where nobody does, or the last one does not let go of its refit."""
        if self.joined:
            try:
                await cleared(self.joined[-1])
                return self.joined[-1]
            except (OmnifleetError, AssertionError, TimeoutError) as error:
                print(f"replaced: {error!r}")
        return await self.join()

    async def join(self) -> Remote:
        """A newcomer in the place of the last one."""
        if self.joined:
            kill(self.joined[-1].process)
        told = SETTINGS | {"first": len(self.joined), "device": RECEIVER}
        (newcomer,) = await self.stack.enter_async_context(remotes(self.spawner, self.checkpoint, 1, **told))
        self.joined.append(newcomer)
        return newcomer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(spawner: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """The second GPU, and nobody there yet."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        settle(**SETTINGS, patch=patch.setattr)
        checkpoint = write_checkpoint(tmp_path_factory.mktemp("refit") / "c")
        print("\n| fault | free after, s | outcome |\n|---|---|---|")
        yield Place(spawner, checkpoint, stack)


@asynccontextmanager
async def sending(lineage: str) -> AsyncIterator[Sender]:
    """A sender on the first GPU, in this process."""
    sender = Sender(lineage, torch.device(SENDER))
    try:
        yield sender
    finally:
        sender.courier.close()


async def heal(worker: Remote, sender: Sender, step: int, *, whole: bool = True) -> None:
    """The next version comes, whole."""
    await sender.publish([worker], step, whole=whole)
    assert await state(worker) == (False, step, True)


async def once(
    sender: Sender, worker: Remote, shipment: Shipment, buckets: list[torch.Tensor], deadline_s: float
) -> Outcome:
    """One round, without the courier's further attempts."""
    orders = {worker.id: Order(worker.client, shipment)}
    return (await sender.courier._round(orders, [Leg(buckets)], deadline_s))[worker.id]


def report(fault: str, seconds: float, outcome: object) -> None:
    """A row of the table."""
    if isinstance(outcome, OmnifleetError):
        outcome = f"{outcome.reason}: {outcome.message}"
    print(f"| {fault} | {seconds:.2f} | {str(outcome).replace('|', '/')[:160]} |", flush=True)


@pytest.mark.parametrize(
    "fault", ["flipped", "reordered", "swapped", "shifted", "zeroed", "truncated", "missing"]
)
async def test_NCL_10_bytes_that_are_not_the_manifests_are_refused_and_the_old_version_serves(
    place: Place, fault: str
) -> None:
    worker = await place.receiver()
    async with sending(fault) as sender:
        await sender.publish([worker], 0)
        shipment = sender.pack(1)
        buckets, began = damaged(sender.buckets(shipment), fault), time.monotonic()
        outcome = await once(sender, worker, shipment, buckets, STUCK_S)
        await cleared(worker, NOBODYS)
        report(f"buckets {fault}", time.monotonic() - began, outcome)
        assert isinstance(outcome, OmnifleetError)
        if fault in (
            "truncated",
            "missing",
        ):  # who waits for the rest is out of time, unless it took something else for it
            assert outcome.reason in (Reason.REFIT_REJECTED, Reason.DEADLINE, Reason.UNAVAILABLE), outcome
        else:
            assert outcome.reason is Reason.REFIT_REJECTED and "checksum" in outcome.message
        assert await state(worker) == (False, 0, True)
        with pytest.raises(OmnifleetError, match="is staged here"):
            await worker.client.commit(shipment.version.manifest_digest, InFlight.KEEP, deadline_s=DEADLINE_S)
        await heal(worker, sender, 1, whole=False)


async def test_a_manifest_that_does_not_fit_is_refused_before_a_byte_moves(place: Place) -> None:
    worker = await place.receiver()
    async with sending("unfit") as sender:
        await sender.publish([worker], 0)
        shipment = sender.pack(1, whole=True)
        for fault, (change, words) in MANIFESTS.items():
            unfit, began = replace(shipment, manifest=changed(shipment.manifest, change)), time.monotonic()
            outcome = await once(sender, worker, unfit, sender.buckets(shipment), DEADLINE_S)
            await cleared(worker, NOBODYS)
            report(f"manifest: {fault}", time.monotonic() - began, outcome)
            assert isinstance(outcome, OmnifleetError) and outcome.reason is Reason.REFIT_REJECTED
            assert words in outcome.message and await state(worker) == (False, 0, True)
        await heal(worker, sender, 1)


async def test_two_refits_that_race_leave_the_receiver_at_one_of_them_whole(place: Place) -> None:
    worker = await place.receiver()
    async with sending("one") as one, sending("two") as two:
        for step in range(3):
            began = time.monotonic()
            done = await asyncio.gather(raced(one, [worker], step), raced(two, [worker], 10 + step))
            await cleared(worker, NOBODYS)
            seconds = time.monotonic() - began
            fenced, at, whole = await state(worker)
            report("two refits race", seconds, f"commits {done[0]} and {done[1]}, at step {at}")
            assert whole and not fenced and (at in (step, 10 + step) or not sum(done))
    async with sending("after the race") as last:
        await heal(worker, last, 20)


@pytest.mark.parametrize("phase", ["packed", "opened", "broadcast", "staged", "committing"])
async def test_a_sender_killed_in_any_phase_leaves_the_receiver_whole_and_the_next_one_heals(
    place: Place, phase: str
) -> None:
    worker = await place.receiver()
    committing = phase == "committing"
    told = SETTINGS | {"device": SENDER, "deadline_s": DEADLINE_S if committing else STUCK_S}
    async with sender_at(place.spawner, [worker], 5, "staged" if committing else phase, **told) as pipe:
        if committing:
            assert await state(worker, "stop at commit") == (False, 0, True)
            pipe.send("go on")
            assert await said(worker.pipe) == "in its gate"
        began = time.monotonic()
    if committing:
        await state(worker, "go on")
    await cleared(worker, NOBODYS)
    seconds, at = time.monotonic() - began, 5 if committing else 0
    report(f"sender killed: {phase}", seconds, f"serves step {at}, and the next sender's after")
    assert await state(worker) == (False, at, True)
    async with sending(f"after {phase}") as successor:
        await heal(worker, successor, 6)


@pytest.mark.parametrize("phase", ["handshake", "before", "staged", "gate", "broadcast"])
async def test_NCL_01_a_receiver_killed_in_any_phase_lets_go_of_the_sender_and_a_newcomer_is_sent_the_whole(
    place: Place, phase: str
) -> None:
    victim = await place.receiver()
    killed: list[float] = []

    def end() -> None:
        killed.append(time.monotonic())
        kill(victim.process)

    async with sending(f"outlives {phase}") as sender:
        if phase == "handshake":
            await state(victim, "stop at join")
        else:
            await sender.publish([victim], 0)
        shipment = sender.pack(1)
        buckets = sender.buckets(shipment)
        if phase == "broadcast":
            buckets = Hooked(buckets, end)
        if phase == "before":
            end()
        dying = asyncio.create_task(die_at(victim, "at the door")) if phase == "handshake" else None
        outcome = (await sender.stage([victim], shipment, buckets))[victim.id]
        if phase == "staged":
            end()
        if phase == "gate":
            await state(victim, "stop at commit")
            dying = asyncio.create_task(die_at(victim, "in its gate"))
        if phase in ("staged", "gate"):
            assert isinstance(outcome, str), outcome
            with pytest.raises(OmnifleetError) as caught:
                await victim.client.commit(outcome, InFlight.KEEP, deadline_s=DEADLINE_S)
            outcome = caught.value
        if dying is not None:
            killed.append(await dying)
        report(f"receiver killed: {phase}", time.monotonic() - killed[0], outcome)
        assert isinstance(outcome, OmnifleetError) and outcome.reason in (Reason.UNAVAILABLE, Reason.DEADLINE)
        await heal(await place.join(), sender, 2)
