"""Steps of few values over a group: what changed alone, proved whole, on the loader path and by plan alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import UNVERIFIED, combined_checksum
from omnifleet.wire.sparse import ENCODING
from omnifleet_refit.fold import as_hex, fold
from omnifleet_rollout.refit import filling as filling_module
from omnifleet_trainer.refit import snapshot as snapshot_module
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.courier import Leg, Order
from omnifleet_trainer.refit.snapshot import Shipment
from tests.refit_fleet import broadcasting
from tests.refit_model import MOVES, Tensors, tensors, write_checkpoint
from tests.refit_world import DEADLINE_S, Sender, receiving

ROW = 4096
WHOLE = ((0, 1),)
"""One rank, whose parameter memory holds every source."""


def few(step: int) -> Tensors:
    """The weights of a step: each changes one value of `q`, and all of `norm`."""
    weights = {name: tensor.clone() for name, tensor in tensors(0).items()}
    for number in range(1, step + 1):
        weights["q"][number % 8, 3] += 1
        weights["norm"] += number
    return weights


async def publish(sender: BroadcastSender, step: int) -> Any:
    return await sender.publish(step, iter(few(step).items()), MOVES, encoder_changed=False)


@pytest.mark.parametrize("planned", [True, False], ids=["by plan", "by the loader"])
async def test_few_values_cost_few_bytes_and_give_the_same_weights(tmp_path: Path, planned: bool) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 3, planned=planned, ranks=WHOLE) as workers,
        broadcasting(workers) as sender,
    ):
        assert (await publish(sender, 0)).bytes >= len(tensors(0)) * ROW
        for step in range(1, 4):
            report = await publish(sender, step)
            assert report.ok == ("w0", "w1", "w2"), report.failed
            assert report.bytes == 2 * ROW, "one row for a value of q, one for norm, whole"
            assert all(worker.has(few(step)) for worker in workers)
        assert [worker.engine.by_plan for worker in workers] == [[False] + [planned] * 3] * 3


async def test_workers_that_differ_get_the_buckets_that_all_of_them_can_take(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        receiving(checkpoint, 1, planned=False) as [able],
        receiving(checkpoint, 1) as [unable],
        receiving(checkpoint, 1) as [mistaken],
    ):
        for worker, id in ((able, "able"), (unable, "unable"), (mistaken, "mistaken")):
            worker.id = id
        assert able.engine.facts.sparse and not unable.engine.facts.sparse, "half of q is not there"
        mistaken.engine._facts = able.engine.facts
        async with broadcasting([able, unable]) as sender:
            await publish(sender, 0)
            assert (await publish(sender, 1)).bytes == 6 * ROW
            assert able.has(few(1)) and unable.has(few(1))
        async with broadcasting([able, mistaken], lineage="m") as sender:
            await publish(sender, 0)
            report = await publish(sender, 1)
            assert report.bytes == 2 * ROW and report.ok == ("able",)
            assert "not kept here" in report.failed["mistaken"] and mistaken.has(few(0))
            report = await publish(sender, 2)
            assert report.ok == ("able", "mistaken") and report.bytes > 2 * ROW, "it is sent none again"
            assert able.has(few(2)) and mistaken.has(few(2))
        async with broadcasting([able], lineage="off", sparse=False) as sender:
            await publish(sender, 0)
            assert (await publish(sender, 1)).bytes == 6 * ROW and able.has(few(1))


async def test_without_room_to_compare_or_to_make_whole_the_buckets_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*told: Any) -> Any:
        raise torch.OutOfMemoryError("a test said so")

    async with receiving(write_checkpoint(tmp_path / "c"), 2, ranks=WHOLE) as workers:
        async with broadcasting(workers) as sender:
            await publish(sender, 0)
            with monkeypatch.context() as patch:
                patch.setattr(snapshot_module, "make_step", no_room)
                assert (await publish(sender, 1)).bytes == 6 * ROW
            with monkeypatch.context() as patch:
                patch.setattr(filling_module, "decode", no_room)
                report = await publish(sender, 2)
            assert sorted(report.failed) == ["w0", "w1"] and "no room" in report.failed["w0"]
            assert all(worker.has(few(1)) for worker in workers)
            report = await publish(sender, 3)
            assert report.ok == ("w0", "w1") and report.bytes > 2 * ROW, "steps are for others now"
            assert all(worker.has(few(3)) for worker in workers)


async def test_a_worker_that_missed_a_version_is_sent_the_buckets_that_it_lacks(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2, ranks=WHOLE) as workers:
        async with broadcasting(workers) as sender:
            await publish(sender, 0)
            there, workers[1].address = workers[1].address, "127.0.0.1:1"
            assert (await publish(sender, 1)).ok == ("w0",)
            workers[1].address = there
            report = await publish(sender, 2)
            assert report.ok == ("w0", "w1") and report.bytes == 6 * ROW
            assert all(worker.has(few(2)) for worker in workers)
            assert (await publish(sender, 3)).bytes == 2 * ROW


Change = Callable[[refit_pb2.Manifest, refit_pb2.TensorSpec, list[torch.Tensor]], None]


def _digest(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    q.digest = "0" * 64


def _encoding(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    q.encoding = "sparse-9"


def _stored(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    q.stored = 7


def _empty(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    q.stored = 0


def _beyond(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    q.stored = 1 << 30


def _flipped(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    buckets[0][q.offset + 5] ^= 1


def _unproved(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    m.checksum_algorithm = UNVERIFIED


def _index(m: refit_pb2.Manifest, q: refit_pb2.TensorSpec, buckets: list[torch.Tensor]) -> None:
    """An index that leaves the tensor, under a checksum that is right."""
    buckets[0][q.offset + 2] = 1
    starts = sorted(t.offset for t in m.tensors if t.changed)
    m.buckets[0].checksum = combined_checksum(as_hex(fold(buckets[0], starts)))


DAMAGES: list[tuple[Change, str]] = [
    (_digest, "when it is made whole"),
    (_encoding, "not known"),
    (_stored, "no whole number"),
    (_empty, "do not fit"),
    (_beyond, "does not hold|lies over"),
    (_flipped, "does not match its checksum"),
    (_unproved, "without checksums"),
    (_index, "do not ascend"),
]


async def test_every_damage_to_a_step_is_refused_by_three_workers_and_the_old_version_serves(
    tmp_path: Path,
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3, ranks=WHOLE) as workers:
        sender = Sender()
        first = await sender.publish(workers, 0)
        assert sender.version is not None
        sender.snapshot.pack(few(1).items(), MOVES, sparse=True)
        step = sender.snapshot.step_on(WeightVersion("r", "l", 1), first.version, sender.digests, False)
        assert step is not None and step.step
        q = next(spec for spec in step.manifest.tensors if spec.name == "q")
        assert (q.encoding, q.stored, q.bytes) == (ENCODING, 8, 256)
        for change, words in DAMAGES:
            manifest = refit_pb2.Manifest()
            manifest.CopyFrom(step.manifest)
            buckets = [bucket.clone() for bucket in sender.snapshot.contents(step)]
            change(manifest, next(spec for spec in manifest.tensors if spec.name == "q"), buckets)
            damaged = Shipment(manifest, step.version, step.buckets, step.bytes)
            orders = {worker.id: Order(worker.client, damaged) for worker in workers}
            outcomes = await sender.courier._round(orders, [Leg(buckets)], DEADLINE_S)
            errors = [outcome for outcome in outcomes.values() if isinstance(outcome, OmnifleetError)]
            assert len(errors) == 3 and all(worker.holds(0) for worker in workers), change.__name__
            told = [error for error in errors if error.reason is Reason.REFIT_REJECTED]
            assert told and all(re.search(words, error.message) for error in told), (change.__name__, errors)
        outcomes = await sender.stage(workers, step, sender.snapshot.contents(step))
        for worker in workers:
            await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
            assert worker.has(few(1)), "the sound one heals"
        sender.courier.close()
