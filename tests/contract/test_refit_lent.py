"""Transport `cuda_ipc` with engines of several ranks: what the sender lends, what each rank takes of it, and what is refused.

Memory of the host stands for a GPU's (`tests/refit_lent.py`); all else is the code that runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.client.refit import DeviceMemory
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire.refit_pb2 import StageRequest
from omnifleet_refit.windows import needs_of
from omnifleet_rollout.refit.source import Lent, source_of
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.courier import Order
from omnifleet_trainer.refit.lender import Lender, lend, places_of
from omnifleet_trainer.refit.snapshot import Shipment
from tests import refit_model
from tests.chaos.test_refit_faults import spawner
from tests.refit_fleet import broadcasting
from tests.refit_lent import Rehearsal, rehearse
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_ranks import ranks_engine
from tests.refit_world import DEADLINE_S, TRANSPORTS, Receiving, Sender, receiving, served

__all__ = ["spawner"]
TWO = ((0, 2), (1, 2))
ROW, HIDDEN = 4096, 64
SLICES = 3 * 2 * ROW + 2 * 4 * ROW + 2 * HIDDEN * 2
"""Bytes of what one rank of two reads of a step: halves of q, k and v, two experts, the norm."""
LENDING: dict[str, Any] = {"transport": "cuda_ipc", "device_bucket_bytes": 5 * ROW}


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Matrices of four rows of bytes, and memory that is mapped without a GPU; none of it stays mapped."""
    monkeypatch.setattr(refit_model, "HIDDEN", HIDDEN)
    rehearsal = rehearse(monkeypatch.setattr)
    yield rehearsal
    assert rehearsal.open == 0


async def publish(sender: BroadcastSender, step: int) -> Any:
    return await sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)


def in_parts(worker: Receiving) -> bool:
    """Whether its last refit came in slices."""
    _, manifest = worker.receiver.serves()
    return manifest is not None and bool(manifest.parts)


async def test_each_rank_cuts_its_slices_out_of_one_snapshot_that_is_shared_once(
    tmp_path: Path, rehearsal: Rehearsal
) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 2, ranks=TWO) as workers,
        broadcasting(workers, **LENDING) as sender,
    ):
        taken = 0.0
        for step in range(4):
            report = await publish(sender, step)
            assert report.ok == ("w0", "w1"), report.failed
            assert all(worker.holds(step) for worker in workers)
            assert [in_parts(worker) for worker in workers] == [step > 0] * 2, "the first is the loader's"
            before, taken = taken, workers[0].counters.count("refit_bytes")
            assert step == 0 or taken - before == SLICES
        assert workers[0].engine.by_plan == [False, True, True, True]
        assert rehearsal.shared == len(sender._snapshot.buckets), "each bucket once, in all steps"
        with_changes = {sender._snapshot.places[name].bucket for name in MOVES}
        first = 2 * 2 * len(sender._snapshot.buckets)
        assert len(rehearsal.mappings) == first + 3 * 2 * 2 * len(with_changes), "each rank what it reads of"
        assert sender._lender._out == {}


async def test_engines_of_one_rank_take_buckets_and_steps_of_few_values_as_ever(
    tmp_path: Path, rehearsal: Rehearsal
) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 1, ranks=((0, 1),)) as (worker,),
        broadcasting([worker], **LENDING) as sender,
    ):
        weights = tensors(0)
        for step in range(3):
            if step:
                weights = {name: tensor.clone() for name, tensor in weights.items()}
                for name in MOVES:
                    weights[name].view(-1)[step] += 1
            report = await sender.publish(step, iter(weights.items()), MOVES, encoder_changed=False)
            assert report.ok == ("w0",) and worker.has(weights), report.failed
        _, manifest = worker.receiver.serves()
        assert manifest is not None and any(spec.encoding for spec in manifest.tensors)
        snapshot = sender._snapshot
        assert snapshot.step is not None
        assert rehearsal.shared == len(snapshot.buckets) + 2 * len(snapshot.step.buckets), "each bucket once"


async def test_who_missed_a_version_is_lent_the_whole_and_cuts_slices_again(tmp_path: Path) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 2, ranks=TWO) as workers,
        broadcasting(workers, **LENDING) as sender,
    ):
        for step in range(2):
            await publish(sender, step)
        sender._delivery.lost_weights("w1")
        assert (await publish(sender, 2)).ok == ("w0", "w1") and not any(map(in_parts, workers))
        assert (await publish(sender, 3)).ok == ("w0", "w1") and all(map(in_parts, workers))
        assert all(worker.holds(3) for worker in workers)


async def test_ranks_without_room_take_what_is_lent_straight_into_place(tmp_path: Path) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 1, ranks=TWO) as (worker,),
        broadcasting([worker], **LENDING) as sender,
    ):
        await publish(sender, 0)
        worker.engine.limit_shadow(0)
        for step in (1, 2):
            report = await publish(sender, step)
            assert report.ok == ("w0",) and worker.holds(step), report.failed
        assert worker.counters.count("refits_in_place") == 2


async def test_ranks_that_are_processes_map_the_same_memory(spawner: Any, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        ranks_engine(spawner, checkpoint, ["cpu", "cpu"]) as engine,
        served(engine, "w0") as worker,
        broadcasting([worker], **LENDING) as sender,
    ):
        for step in range(3):
            report = await publish(sender, step)
            assert report.ok == ("w0",), report.failed
            assert await engine.holds(step) and in_parts(worker) == (step > 0)
        assert engine.by_plan == [False, True, True]


async def cut(worker: Receiving, sender: Sender) -> Shipment:
    """Version 1 in slices, on top of version 0."""
    _, bodies = await worker.client.needs()
    needs, held, version = [needs_of(body) for body in bodies], dict(sender.digests), sender.version
    sender.snapshot.pack(tensors(1).items(), MOVES)
    takers = {"w0": Taker(version, held, False)}
    shipment = choose(sender.snapshot, WeightVersion("r", "l", 1), takers, needs, False)["w0"]
    assert shipment.parts
    return shipment


def _nowhere(source: DeviceMemory) -> DeviceMemory:
    places = dict(source.places)
    del places["q"]
    return replace(source, places=places)


def _at(bucket: int, offset: int) -> Callable[[DeviceMemory], DeviceMemory]:
    return lambda source: replace(source, places=source.places | {"q": (bucket, offset)})


DAMAGES: list[tuple[Callable[[DeviceMemory], DeviceMemory], str]] = [
    (_nowhere, "nothing says where it lies"),
    (_at(99, 0), "does not lie at 0 of bucket 99"),
    (_at(0, 8), "does not lie at 8"),
    (_at(0, 100 * ROW), "lie beyond the 20480"),
    (_at(0, 0), "does not match its checksum"),
    (lambda source: replace(source, handles={}), "on GPU none"),
    (lambda source: replace(source, handles={"GPU-far": source.handles["GPU-of-the-sender"]}), "GPU-far"),
    (lambda source: replace(source, handles={"GPU-of-the-sender": "?"}), "cannot be read"),
]


async def test_what_cannot_be_cut_or_reached_is_refused_unmapped_and_the_old_version_serves(
    tmp_path: Path, rehearsal: Rehearsal
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1, ranks=TWO) as (worker,):
        sender = Sender()
        sender.snapshot._limit = 5 * ROW
        await sender.publish([worker], 0)
        shipment = await cut(worker, sender)
        source = lend(sender.snapshot.buckets, places_of(sender.snapshot, shipment))
        for change, words in DAMAGES:
            with pytest.raises(OmnifleetError, match=words) as caught:
                await worker.client.stage(shipment.manifest, change(source), deadline_s=DEADLINE_S)
            far = words in ("on GPU none", "GPU-far")
            unread = words == "cannot be read"
            assert caught.value.reason is (
                Reason.UNSUPPORTED if far else Reason.INVALID_REQUEST if unread else Reason.REFIT_REJECTED
            )
            assert not far or (caught.value.knob == "refit.transport" and "= nccl" in caught.value.message)
            await worker.engine.drop_stage()
            assert worker.holds(0) and rehearsal.open == 0, words
        rehearsal.broken = True
        with pytest.raises(OmnifleetError, match=r"cannot be mapped .*invalid resource handle") as caught:
            await worker.client.stage(shipment.manifest, source, deadline_s=DEADLINE_S)
        assert caught.value.reason is Reason.UNSUPPORTED and "more lines" not in caught.value.message
        rehearsal.broken, rehearsal.own, rehearsal.gpus = False, "GPU-beside", {"GPU-of-the-sender"}
        digest = await worker.client.stage(shipment.manifest, source, deadline_s=DEADLINE_S)
        await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)
        assert worker.holds(1) and in_parts(worker), "a GPU beside the sender's reaches it"
        sender.courier.close()


class Answering:
    """A worker's client that answers a stage with this."""

    def __init__(self, outcome: str | OmnifleetError) -> None:
        self.outcome, self.source = outcome, DeviceMemory({})

    async def stage(self, manifest: Any, source: DeviceMemory, **told: Any) -> str:
        self.source = source
        if isinstance(self.outcome, OmnifleetError):
            raise self.outcome
        return self.outcome


async def test_what_is_lent_is_held_until_the_worker_has_answered() -> None:
    lender, buckets = Lender(), [torch.zeros(ROW, dtype=torch.uint8)]
    late, no = OmnifleetError(Reason.DEADLINE, "late"), OmnifleetError(Reason.REFIT_REJECTED, "no")
    clients: dict[str, Any] = {"good": Answering("d"), "bad": Answering(no), "late": Answering(late)}
    orders = {id: Order(client, Shipment(Any, Any, (), 0)) for id, client in clients.items()}
    places = {"q": (0, 0)}
    assert await lender.stage(orders, buckets, places, 1.0) == {"good": "d", "bad": no, "late": late}
    assert [client.source.places for client in clients.values()] == [places] * 3
    assert list(lender._out) == ["late"]
    clients["late"].outcome = "d"
    await lender.stage({"late": orders["late"]}, buckets, places, 1.0)
    assert lender._out == {}


def test_handles_and_places_cross_as_they_are() -> None:
    request = StageRequest()
    DeviceMemory({"GPU-1": '[["aGk=", 8, 0]]'}, {"q": (3, 2 * ROW), "k": (0, 0)}).enter(request)
    source = Lent.parse(source_of(request, TRANSPORTS))
    assert source == Lent({"GPU-1": [["aGk=", 8, 0]]}, {"q": (3, 2 * ROW), "k": (0, 0)})
    assert source.only(0) == Lent({"GPU-1": [["aGk=", 8, 0]]})
