"""Engines of two ranks are sent slices: each rank its own, what both read once; the weights are those of the whole path."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import combined_checksum
from omnifleet_refit.fold import as_hex, fold
from omnifleet_refit.windows import needs_of
from omnifleet_rollout.refit import stager as stager_module
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.courier import Leg, Order
from omnifleet_trainer.refit.parts import Cut
from tests import refit_model
from tests.refit_fleet import broadcasting
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_world import CPU, DEADLINE_S, Receiving, Sender, receiving

TWO = ((0, 2), (1, 2))
"""Both ranks of an engine of two."""
ROW = 4096
HIDDEN = 64


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of four rows of bytes, so that halves of them are worth sending."""
    monkeypatch.setattr(refit_model, "HIDDEN", HIDDEN)


async def publish(sender: BroadcastSender, step: int) -> Any:
    return await sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)


def in_parts(worker: Receiving) -> bool:
    """Whether its last refit came in slices."""
    _, manifest = worker.receiver.serves()
    return manifest is not None and bool(manifest.parts)


async def test_each_rank_takes_its_slices_and_holds_what_whole_tensors_give(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        receiving(checkpoint, 3, ranks=TWO) as workers,
        receiving(checkpoint, 1, ranks=TWO) as (whole,),
        broadcasting(workers, device_bucket_bytes=5 * ROW) as sender,
    ):
        other = Sender()
        for step in range(4):
            report = await publish(sender, step)
            assert report.ok == ("w0", "w1", "w2"), report.failed
            await other.publish([whole], step)
            assert all(worker.holds(step) for worker in [*workers, whole])
            assert [in_parts(worker) for worker in workers] == [step > 0] * 3, "the first is the loader's"
            assert not in_parts(whole)
        assert report.bytes == 5 * 4 * ROW + ROW, "each slice once: q, k, v, two experts, norm"
        assert workers[0].engine.by_plan == [False, True, True, True]
        for mine, theirs in zip(workers[0].engine.models, whole.engine.models, strict=True):
            for name, tensor in mine.state_dict().items():
                assert torch.equal(tensor.view(torch.uint8), theirs.state_dict()[name].view(torch.uint8)), (
                    name
                )
        other.courier.close()


async def test_who_needs_everything_gets_it_whole_and_goes_in_slices_from_then_on(tmp_path: Path) -> None:
    checkpoint, plans = write_checkpoint(tmp_path / "c"), tmp_path / "plans"
    async with (
        receiving(checkpoint, 2, ranks=TWO, plans=plans) as workers,
        broadcasting(workers, device_bucket_bytes=5 * ROW) as sender,
    ):
        for step in range(2):
            await publish(sender, step)
        there, workers[0].address = workers[0].address, "127.0.0.1:1"
        sender._read = ("", [])  # what engines read must then be asked of the one that answers
        assert (await publish(sender, 2)).ok == ("w1",) and in_parts(workers[1])
        workers[0].address = there
        assert (await publish(sender, 3)).ok == ("w0", "w1"), "one of them had missed a version"
        assert all(worker.holds(3) and in_parts(worker) for worker in workers)
    async with receiving(checkpoint, 2, ranks=TWO, plans=plans) as workers:
        async with broadcasting(workers, lineage="next", device_bucket_bytes=5 * ROW) as sender:
            seen = []
            for step in range(4, 6):
                assert (await publish(sender, step)).ok == ("w0", "w1")
                assert all(worker.holds(step) for worker in workers)
                seen.append(in_parts(workers[0]))
            assert seen == [False, True]
            assert workers[0].engine.by_plan == [True, True], "its plan was kept from the first start"


async def test_a_check_that_is_due_waits_for_whole_tensors_and_engines_that_differ_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    monkeypatch.setattr(stager_module, "CHECK_EVERY", 2)
    async with (
        receiving(checkpoint, 2, ranks=TWO) as workers,
        broadcasting(workers, device_bucket_bytes=5 * ROW) as sender,
    ):
        for step in range(4):
            await publish(sender, step)
        assert all(in_parts(worker) for worker in workers)
        for worker in workers:
            sender._delivery.lost_weights(worker.id)
        await publish(sender, 4)
        assert not in_parts(workers[0]) and all(worker.holds(4) for worker in workers)
        assert workers[0].engine.by_plan == [False, True, True, True, False], "checked again"
    async with (
        receiving(checkpoint, 1, ranks=TWO) as [two],
        receiving(checkpoint, 1, ranks=((0, 1),)) as [one],
    ):
        one.id = "one"
        async with broadcasting([two, one], device_bucket_bytes=5 * ROW) as sender:
            for step in range(2):
                assert len((await publish(sender, step)).ok) == 2
                assert not in_parts(two) and two.holds(step) and one.holds(step)


Change = Callable[[refit_pb2.Manifest, list[list[torch.Tensor]]], None]


def _missing(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    del m.parts[0].pieces[0]


def _foreign(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].pieces[0].window.offset += HIDDEN


def _twice(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].pieces.append(m.parts[0].pieces[0])


def _twice_in_two(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[2].CopyFrom(m.parts[0])


def _nobody(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].ranks[:] = [7]


def _unnamed(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].pieces[0].name = "stranger"


def _short(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].pieces[0].bytes -= 4


def _over(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].pieces[1].offset = m.parts[0].pieces[0].offset


def _buckets(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.buckets.add(index=0, bytes=ROW)


def _sparse(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    spec = next(spec for spec in m.tensors if spec.changed)
    spec.encoding, spec.stored = "sparse-1", 8


def _digest(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[1].pieces[0].digest = "0" * 64


def _flipped(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    legs[2][-1][40] ^= 1


def _swapped(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    """The slices of the other rank."""
    legs[0], legs[2] = legs[2], legs[0]


def _checksum(m: refit_pb2.Manifest, legs: list[list[torch.Tensor]]) -> None:
    m.parts[0].buckets[0].checksum = combined_checksum(as_hex(fold(legs[2][0], [0])))


DAMAGES: list[tuple[Change, str]] = [
    (_missing, "1 are missing"),
    (_foreign, "1 are missing, 1 are not its own"),
    (_twice, "twice"),
    (_twice_in_two, "missing"),
    (_nobody, "missing"),
    (_unnamed, "does not name"),
    (_short, "do not fit"),
    (_over, "lies over"),
    (_buckets, "neither buckets"),
    (_sparse, "neither buckets|no parent"),
    (_digest, "does not match its checksum"),
    (_flipped, "does not match its checksum"),
    (_swapped, "does not match its checksum"),
    (_checksum, "does not match its checksum"),
]


async def test_parts_that_are_not_what_a_rank_reads_are_refused_and_the_old_version_serves(
    tmp_path: Path,
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2, ranks=TWO) as workers:
        sender = Sender()
        sender.snapshot._limit = 5 * ROW
        first = await sender.publish(workers, 0)
        digest, bodies = await workers[0].client.needs()
        assert digest and len(bodies) == 2
        needs = [needs_of(body) for body in bodies]
        held = dict(sender.digests)
        sender.snapshot.pack(tensors(1).items(), MOVES)
        takers = {worker.id: Taker(first.version, held, False) for worker in workers}
        chosen = choose(sender.snapshot, WeightVersion("r", "l", 1), takers, needs, False)
        shipment = chosen["w0"]
        assert [part.ranks for part in shipment.parts] == [(0,), (0, 1), (1,)]
        for change, words in DAMAGES:
            manifest = refit_pb2.Manifest()
            manifest.CopyFrom(shipment.manifest)
            legs = [[bucket.clone() for bucket in Cut(part, sender.snapshot, CPU)] for part in shipment.parts]
            change(manifest, legs)
            damaged = replace(shipment, manifest=manifest)
            orders = {worker.id: Order(worker.client, damaged, 2) for worker in workers}
            sent = [Leg(leg, part.ranks) for leg, part in zip(legs, shipment.parts, strict=True)]
            outcomes = await sender.courier._round(orders, sent, DEADLINE_S / 2)
            errors = [outcome for outcome in outcomes.values() if isinstance(outcome, OmnifleetError)]
            assert len(errors) == 2 and all(worker.holds(0) for worker in workers), change.__name__
            told = [error for error in errors if error.reason is Reason.REFIT_REJECTED]
            assert told and all(re.search(words, error.message) for error in told), (change.__name__, errors)
        orders = {worker.id: Order(worker.client, shipment, 2) for worker in workers}
        sound = [Leg(Cut(part, sender.snapshot, CPU), part.ranks) for part in shipment.parts]
        outcomes = await sender.courier.stage_legs(orders, sound, DEADLINE_S)
        for worker in workers:
            await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
            assert worker.holds(1) and in_parts(worker), "the sound one heals"
        sender.courier.close()
