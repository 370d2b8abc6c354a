"""The canary: a worker whose logprobs differ is quarantined, put back, tried once more, and then left where it is right."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.refit.guard import Canary, Guard
from tests.unit.test_refit_sender import fleet_of, holds
from tests.waiting import beside, until

CANARY = Canary((1, 2), (3, 4, 5), 0.1)


class Said(Guard):
    """A guard whose workers' scores are given: id -> difference in nats of the next checks, one after another."""

    def __init__(self, **differences: list[float]) -> None:
        async def expect(batch: StepBatch) -> list[float]:
            return [-1.0] * len(batch.samples[0].token_ids)

        super().__init__(CANARY, "", expect)
        self.differences = differences
        self.asked: list[str] = []

    async def difference(self, worker: WorkerView, number: int) -> float:
        self.asked.append(worker.id)
        left = self.differences.get(worker.id, [])
        return left.pop(0) if left else 0.0


def test_the_canary_is_one_sample_of_text() -> None:
    (sample,) = CANARY.batch().samples
    assert sample.prompt_token_ids == [1, 2] and sample.token_ids == [3, 4, 5] and not sample.media


async def test_beyond_the_tolerance_is_corrupt_and_an_older_version_is_let_pass() -> None:
    guard = Said(w=[0.05, 0.2, float("inf")])
    await guard.look(3)
    worker = WorkerView("w")
    await guard.check(worker, 3)
    with pytest.raises(OmnifleetError, match="differ from the trainer") as caught:
        await guard.check(worker, 3)
    assert caught.value.reason is Reason.CORRUPT and caught.value.knob == "refit.canary.tolerance"
    await guard.check(worker, 2)
    assert guard.differences["w"] == [float("inf")]


async def test_a_worker_that_the_canary_tells_against_is_put_back_and_then_gets_everything_again(
    tmp_path: Path,
) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        fleet.sender.guard = Said(w1=[0.0, 0.5, 0.0])
        await fleet.publish(0)
        report = await fleet.publish(1)
        assert report.ok == ("w0",)
        assert re.search("differ from the trainer's .* it serves r/l:0 again", report.failed["w1"])
        bad = fleet.registry.workers["w1"]
        assert bad.quarantined and bad.parents[-1] == "none" and holds(bad, 0)
        async with beside(fleet.sender.keep_up()):
            await until(lambda: holds(bad, 1))
        assert bad.parents[-1] == "none", "a complete refit"


async def test_a_worker_that_stays_wrong_stays_at_the_version_before_until_the_next_one(
    tmp_path: Path,
) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        guard = fleet.sender.guard = Said(w0=[0.0, 0.5, 0.0, 0.5, 0.0])
        async with beside(fleet.sender.keep_up()):
            for number in range(3):
                await fleet.publish(number)
                bad = fleet.registry.workers["w0"]
                if number == 1:
                    await until(lambda: not guard.differences["w0"] and not fleet.sender.catching_up.behind)
                    asked = len(guard.asked)
                    fleet.registry.moved()
                    await asyncio.sleep(0)
                    assert len(guard.asked) == asked and holds(bad, 0)
            await until(lambda: holds(bad, 2))
        assert len(fleet.files()) == 3, "base, the newest delta, and the one before it"
    assert fleet.files() == []


async def test_a_worker_that_was_never_right_serves_nothing_until_the_next_version(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        fleet.sender.guard = Said(w0=[0.5, 0.5])
        async with beside(fleet.sender.keep_up()):
            report = await fleet.publish(0)
            assert "no version before" in report.failed["w0"]
            bad = fleet.registry.workers["w0"]
            await until(lambda: len(bad.quarantined) == 2)
            assert bad.fenced
            await fleet.publish(1)
            await until(lambda: holds(bad, 1))


async def test_a_worker_that_is_wrong_at_the_version_before_too_serves_nothing(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        fleet.sender.guard = Said(w0=[0.0, 0.5, 0.7])
        await fleet.publish(0)
        report = await fleet.publish(1)
        bad = fleet.registry.workers["w0"]
        assert bad.fenced and "it serves nothing: put back to" in report.failed["w0"]
        assert len(bad.quarantined) == 2


async def test_nothing_is_asked_where_there_is_no_canary(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        assert fleet.sender.guard is None
        report = await fleet.publish(0)
        assert report.version == WeightVersion("r", "l", 0) and report.ok == ("w0",)
