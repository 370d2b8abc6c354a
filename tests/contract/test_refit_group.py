"""Transport `nccl` on CPU: one sender and three receivers in a gloo group, over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet_trainer.refit.courier import Leg, Order
from omnifleet_trainer.refit.snapshot import Shipment
from tests.refit_damage import MANIFESTS, changed, damaged
from tests.refit_model import tensors, write_checkpoint
from tests.refit_world import DEADLINE_S, Receiving, Sender, receiving


async def test_three_receivers_hold_what_a_fresh_loader_makes_first_checked_then_by_plan(
    tmp_path: Path,
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        sender = Sender()
        first = await sender.publish(workers, 0)
        assert all(worker.holds(0) for worker in workers)
        second = await sender.publish(workers, 1)
        assert all(worker.holds(1) for worker in workers)
        assert [worker.engine.by_plan for worker in workers] == [[False, True]] * 3
        assert second.bytes < first.bytes, "the frozen bucket is not sent again"
        unchanged = [t.name for t in second.manifest.tensors if not t.changed]
        assert sorted(unchanged) == ["embed", "expert.0"]
        sender.courier.close()


async def test_without_a_plan_the_loader_path_gives_the_same(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1, planned=False) as workers:
        sender = Sender()
        for step in range(3):
            await sender.publish(workers, step)
            assert workers[0].holds(step) and workers[0].engine.by_plan[-1] is False
        sender.courier.close()


async def test_the_group_is_kept_for_equal_members_and_remade_for_others(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 4) as workers:
        sender = Sender()
        names = []
        for step, members in enumerate([workers[:3], workers[:3], workers, workers[1:]]):
            await sender.publish(members, step, whole=True)
            names.append(sender.courier._name)
            assert all(worker.holds(step) for worker in members)
        assert names[0] == names[1] and len(set(names)) == 3
        sender.courier.close()


async def test_NCL_06_a_tensor_larger_than_a_bucket_has_one_for_itself(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as workers:
        sender = Sender()
        sender.snapshot._limit = 64  # bytes; every tensor is larger
        shipment = await sender.publish(workers, 0)
        assert len(shipment.buckets) == len(tensors(0)) and workers[0].holds(0)
        sender.courier.close()


async def test_NCL_11_bfloat16_is_rounded_to_nearest_even_and_arrives_bit_for_bit(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as workers:
        sender = Sender()
        values = torch.tensor([1.00390625, 1.01171875, 0.1, 0, 0, 0, 0, 0])
        weights = {**tensors(0), "norm": values}
        sender.snapshot.pack(weights.items(), weights)
        shipment = sender.snapshot.shipment(WeightVersion("r", "l", 0), None, None, True)
        digest = (await sender.stage(workers, shipment))["w0"]
        await workers[0].client.commit(str(digest), InFlight.KEEP, deadline_s=DEADLINE_S)
        assert workers[0].engine.model.norm[:3].float().tolist() == [1.0, 1.015625, 0.10009765625]
        sender.courier.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.soak)])
async def test_NCL_08_many_groups_form_at_once_and_again_on_ports_that_nobody_probed(
    tmp_path: Path, rounds: int
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 8) as workers:
        senders = [Sender() for _ in workers]
        for step in range(rounds):

            async def one(sender: Sender, worker: Receiving, step: int = step) -> None:
                await sender.publish([worker], step, whole=True)
                sender.courier.close()

            await asyncio.gather(*map(one, senders, workers))
            assert all(worker.holds(step) for worker in workers)


async def test_NCL_05_padding_is_left_alone_and_a_vocabulary_of_another_size_is_refused(
    tmp_path: Path,
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as (worker,):
        sender = Sender()
        for step in range(2):
            await sender.publish([worker], step, whole=True)
            embed = worker.engine.model.embed
            assert torch.equal(embed[:13], tensors(step)["embed"])
            assert not embed[13:].any(), "rows that the trainer does not have"
        resized = Sender("resized")
        weights = {**tensors(2), "embed": torch.zeros(14, 8)}
        resized.snapshot.pack(weights.items(), weights)
        shipment = resized.snapshot.shipment(WeightVersion("r", "resized", 2), None, None, True)
        outcome = (await resized.stage([worker], shipment))["w0"]
        assert isinstance(outcome, OmnifleetError) and "embed is F32[14, 8]" in outcome.message
        assert worker.holds(1)
        for one in (sender, resized):
            one.courier.close()


async def test_a_worker_without_room_for_a_shadow_refuses_and_serves_on_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*size: Any, **told: Any) -> torch.Tensor:
        if told.get("device") == device and size != (0,):
            raise torch.OutOfMemoryError("out of memory")
        return empty(*size, **told)

    device, empty = torch.device("cpu", 0), torch.empty
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        sender, victim = Sender(), workers[1]
        await sender.publish(workers, 0)
        shipment = sender.pack(1)
        memory = victim.engine.stager._reception.memory
        memory.release()
        memory.device = device
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            outcomes = await sender.stage(workers, shipment)
        refusal = outcomes[victim.id]
        assert isinstance(refusal, OmnifleetError) and refusal.reason is Reason.NO_ROOM
        assert "no room for a shadow of" in refusal.message and victim.holds(0)
        for worker in (workers[0], workers[2]):
            digest = outcomes[worker.id]
            assert isinstance(digest, str), digest
            await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)
            assert worker.holds(1)
        await sender.publish(workers, 2, whole=True)
        assert all(worker.holds(2) for worker in workers), "the next one heals"
        sender.courier.close()


async def refused(
    sender: Sender, workers: list[Receiving], manifest: refit_pb2.Manifest, shipment: Shipment
) -> str:
    """Stage a manifest as it is, with the buckets of the shipment, on three workers; why it was refused. The old version serves.

    The first refusal breaks the round for all, so the others may only hear of that.
    """
    spoilt = replace(shipment, manifest=manifest)
    orders = {worker.id: Order(worker.client, spoilt) for worker in workers}
    outcomes = await sender.courier._round(orders, [Leg(sender.buckets(shipment))], DEADLINE_S)
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, OmnifleetError)]
    assert len(errors) == len(workers) and all(worker.holds(-1) for worker in workers)
    told = [error.message for error in errors if error.reason is Reason.REFIT_REJECTED]
    others = {error.reason for error in errors} - {Reason.REFIT_REJECTED}
    assert told and others <= {Reason.UNAVAILABLE, Reason.CONFLICT, Reason.DEADLINE}, errors
    return told[0]


async def test_a_manifest_that_does_not_fit_the_engine_or_its_buckets_is_refused(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        sender = Sender()
        shipment = sender.pack(0)
        for change, words in MANIFESTS.values():
            assert words in await refused(sender, workers, changed(shipment.manifest, change), shipment)
        await sender.publish(workers, 1, whole=True)
        assert all(worker.holds(1) for worker in workers), "the next one heals"
        sender.courier.close()


@pytest.mark.parametrize(
    "fault", ["flipped", "reordered", "shifted", "zeroed", "truncated", "of another version"]
)
async def test_NCL_10_bytes_that_are_not_the_manifests_are_refused_by_all_and_the_old_version_serves(
    tmp_path: Path, fault: str
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        sender = Sender()
        await sender.publish(workers, 0)
        shipment = sender.pack(1)
        if fault == "of another version":
            other = Sender()
            buckets = other.buckets(other.pack(7, whole=True))[-len(shipment.buckets) :]
        else:
            buckets = damaged(sender.buckets(shipment), fault)
        outcomes = await sender.stage(workers, shipment, buckets)
        for worker in workers:
            outcome = outcomes[worker.id]
            assert isinstance(outcome, OmnifleetError) and "checksum" in outcome.message
            assert worker.holds(0) and worker.version.number == 0
            with pytest.raises(OmnifleetError, match="is staged here"):
                await worker.client.commit(
                    shipment.version.manifest_digest, InFlight.KEEP, deadline_s=DEADLINE_S
                )
        await sender.publish(workers, 1)
        assert all(worker.holds(1) for worker in workers), "the retry heals"
        sender.courier.close()
