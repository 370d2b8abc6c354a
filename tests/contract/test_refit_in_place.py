"""One worker without room for a shadow and what arrives for it: right or wrong, whole or half, told of before or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet.wire.refit_pb2 import Manifest
from omnifleet_trainer.refit.courier import Leg, Order
from tests.refit_damage import MANIFESTS, changed, damaged
from tests.refit_files import FileSender, shared_folder
from tests.refit_model import expected, tensors, write_checkpoint
from tests.refit_world import DEADLINE_S, Sender, receiving
from tests.waiting import until

FAULTS = ["flipped", "shifted", "zeroed", "truncated", "missing"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


@pytest.mark.parametrize("planned", [True, False], ids=["plan", "loader"])
async def test_what_arrives_wrong_leaves_it_fenced_until_a_complete_refit(
    tmp_path: Path, planned: bool
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2, planned=planned) as (worker, other):
        sender = Sender()
        sender.in_place, sender.snapshot._limit = InFlight.KEEP, 512
        await sender.publish([worker, other], 0)
        worker.engine.limit_shadow(0)
        for step, fault in enumerate(FAULTS, 1):
            whole = sender.pack(step, whole=True)
            *good, last = sender.buckets(whole)
            bad = good if fault == "missing" else good + damaged([last], fault)
            deadline_s = 1.0 if fault == "missing" else DEADLINE_S
            orders = {"w0": Order(worker.client, whole, in_place=InFlight.KEEP)}
            outcome = (await sender.courier._round(orders, [Leg(bad)], deadline_s))["w0"]
            assert isinstance(outcome, OmnifleetError), outcome
            await until(lambda: not worker.receiver.receiving)
            assert outcome.reason is (Reason.DEADLINE if fault == "missing" else Reason.FENCED), outcome
            assert worker.fenced and f":{step}" in worker.standing.fence and other.holds(0)
            with pytest.raises(OmnifleetError) as caught:
                worker.gate.reserve(1)
            assert caught.value.reason is Reason.FENCED and caught.value.retryable
            on_top = (await sender.stage([worker], sender.pack(step)))["w0"]
            assert isinstance(on_top, OmnifleetError) and "complete refit" in on_top.message
            healing = (await sender.stage([worker], whole))["w0"]
            assert isinstance(healing, str) and worker.holds(step), "it serves at once, without a commit"
            commit = await worker.client.commit(healing, InFlight.KEEP, deadline_s=DEADLINE_S)
            assert commit.version == worker.version and commit.tensors_loaded == len(tensors(0))
        assert worker.counters.count("refits_fenced") == len(FAULTS)
        sender.courier.close()


async def test_a_flipped_bucket_of_a_file_leaves_it_fenced_until_a_complete_refit(
    tmp_path: Path, folder: Path
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1, planned=False) as (worker,):
        sender = FileSender("l", folder)
        await sender.publish([worker], 0)
        worker.engine.limit_shadow(0)
        bad = sender.pack(1)
        with bad.transfer.path.open("r+b") as file:
            file.seek(-64, 2)
            file.write(b"\xff" * 4)
        with pytest.raises(OmnifleetError, match="checksum") as caught:
            await sender.stage(worker, bad, InFlight.KEEP)
        assert caught.value.reason is Reason.FENCED and worker.fenced
        await sender.stage(worker, sender.pack(2), InFlight.KEEP)
        assert worker.holds(2)
        sender.close()


def _on_top(manifest: Manifest) -> None:
    manifest.parent.CopyFrom(manifest.version)


async def test_what_the_manifest_tells_is_refused_before_the_fence(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as (worker,):
        sender = Sender()
        await sender.publish([worker], 0)
        worker.engine.limit_shadow(0)
        whole = sender.pack(1, whole=True)
        wrong = [
            MANIFESTS[name] for name in ("unknown name", "missing name", "duplicated name", "wrong dtype")
        ]
        wrong += [MANIFESTS["wrong shape"], MANIFESTS["no checksums"], (_on_top, "builds on")]
        for change, words in wrong:
            spoilt = replace(whole, manifest=changed(whole.manifest, change))
            order = Order(worker.client, spoilt, in_place=InFlight.KEEP)
            legs = [Leg(sender.buckets(whole))]
            outcome = (await sender.courier._round({"w0": order}, legs, DEADLINE_S))["w0"]
            assert isinstance(outcome, OmnifleetError) and outcome.reason is Reason.REFIT_REJECTED, outcome
            assert words.split()[0] in outcome.message and worker.holds(0)
        sender.courier.close()


async def test_a_plan_that_makes_something_else_is_dropped_where_sources_pass_by_once(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as (worker,):
        sender = Sender()
        sender.in_place = InFlight.KEEP
        worker.engine.limit_shadow(0)
        load = worker.engine.stager._load

        def turning() -> None:
            load()
            worker.engine.model.norm.data.mul_(2)  # as engines do that pack or scale after loading

        worker.engine.stager._load = turning
        for step in range(2):
            outcome = (await sender.stage([worker], sender.pack(step, whole=True)))["w0"]
            assert isinstance(outcome, str), outcome
        assert worker.engine.by_plan == [False, False] and worker.engine.stager.needs_digest == ""
        want = expected(1) | {"norm": expected(1)["norm"] * 2}
        have = worker.engine.model.state_dict()
        assert all(torch.equal(have[name], value) for name, value in want.items())
        sender.courier.close()
