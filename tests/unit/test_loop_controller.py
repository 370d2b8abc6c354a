"""The asynchronous loop against fake services: what must hold of a run whatever its parts do. Names carry case ids."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.config.recipe import TrainerConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Generation, Identity, WeightVersion
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.checkpoint import latest_checkpoint
from omnifleet_trainer.loop.admission import Admission, capacity
from omnifleet_trainer.loop.buffer import check_buffer
from omnifleet_trainer.loop.turns import Apart
from tests.unit.ledger_samples import group_of
from tests.unit.loop_world import FakeRollout, rows, world


async def test_a_run_trains_every_step_and_ends_by_itself(tmp_path: Path) -> None:
    with world(tmp_path, steps=4, checkpoint_every=2) as w:
        assert await w.controller.run()
        counts = w.ledger.counts()
        summary = await w.controller.summary()
    assert [len(batch.samples) for batch in w.policy.trained] == [4, 4, 4, 4]
    assert (counts.consumed, counts.consumed_twice, counts.lost, counts.steps) == (16, 0, 0, 4)
    assert w.checkpoints == [2, 4]
    assert summary["refits"] == 5 and summary["heldout_start"] == summary["heldout_end"] == 0.0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {
        "reward",
        "tmpe",
        "lag_mean",
        "lag/0",
        "tokens_per_s",
        "wait_share",
        "refit_ms",
        "media_puts",
    } <= lines[1].keys()
    assert "heldout_reward" in lines[4]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


async def test_the_loop_says_in_words_what_it_does(tmp_path: Path) -> None:
    with world(tmp_path, steps=2) as w:
        seen: list[str] = [w.controller.doing]

        async def look(identity: Identity, answer: Generation) -> None:
            seen.append(w.controller.doing)

        train = w.policy.train

        def look_and_train(batch: StepBatch) -> dict[str, float]:
            seen.append(w.controller.doing)
            return train(batch)

        w.rollout.behave, w.policy.train = look, look_and_train  # type: ignore[method-assign]
        await w.controller.run()
        seen.append(w.controller.doing)
    assert seen[0] == "" and seen[-1] == "step 2: writing the last checkpoint"
    assert {"step 1: waiting for replies", "step 1: training", "step 2: training"} <= set(seen)


async def test_pictures_are_put_once_for_all_generations_steps_and_rows(tmp_path: Path) -> None:
    with world(tmp_path, data=rows(4), steps=6) as w:
        await w.controller.run()
    assert w.pictures.puts == 2  # two rows share a picture


async def test_staleness_never_exceeds_the_budget_and_refits_meet_requests_in_flight(tmp_path: Path) -> None:
    async def slow(identity: Identity, answer: Generation) -> None:
        for _ in range(5 + int(identity.prompt_id[1:])):
            await asyncio.sleep(0.001)

    with world(tmp_path, steps=8, max_staleness=2) as w:
        w.rollout.behave = slow
        await w.controller.run()
    lags = [lag for batch in w.policy.trained for sample in batch.samples for lag in sample.lag]
    assert 0 < max(lags) <= 2 and min(lags) >= 0
    assert max(w.journal.values("refit_in_flight")) > 0


async def test_a_budget_of_0_is_synchronous(tmp_path: Path) -> None:
    with world(tmp_path, steps=4, max_staleness=0) as w:
        await w.controller.run()
    assert {lag for batch in w.policy.trained for sample in batch.samples for lag in sample.lag} == {0}
    assert max(w.journal.values("refit_in_flight")) == 0


def test_ASY_01_capacity_follows_the_formula() -> None:
    assert capacity(bound=1, version=10, batch=4, accepted=40, running=0) == 8
    assert capacity(bound=1, version=10, batch=4, accepted=44, running=3) == 1


async def test_ASY_01_credits_survive_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"prompts_per_step": 4, "data": rows(60), "buffer_groups": 1000}
    with world(tmp_path, steps=10, **settings) as w:
        await w.controller.run()
        before = w.admission.capacity()
        assert w.ledger.counts().consumed == 2 * 40
        ready = len(w.ledger.ready())
    with world(tmp_path, steps=30, resume_at=10, **settings) as w:
        assert before + ready == w.admission.capacity() + len(w.ledger.ready()) == 8
        await w.controller.run()
    lags = [lag for batch in w.policy.trained for sample in batch.samples for lag in sample.lag]
    assert len(w.policy.trained) == 20 and max(lags) <= 1


async def test_ASY_03_an_endless_rollout_neither_stalls_the_step_nor_wedges_resume(tmp_path: Path) -> None:
    async def endless(identity: Identity, answer: Generation) -> None:
        if identity.prompt_id == "p1":
            await asyncio.Event().wait()

    settings = {
        "data": rows(3),
        "prompts_per_step": 3,
        "max_staleness": 0,
        "rollout_timeout_s": 0.1,
        "attempts_per_prompt": 2,
        "generations_per_prompt": 4,
    }
    with world(tmp_path, steps=1, **settings) as w:
        w.rollout.behave = endless
        async with asyncio.timeout(10):
            await w.controller.run()
        assert w.counters.count("rollout_timeouts") >= 2
        assert "p1" not in {name for names in w.trained_prompts() for name in names}
    with world(tmp_path, steps=3, resume_at=1, **settings) as w:
        w.rollout.behave = endless
        async with asyncio.timeout(10):
            await w.controller.run()
        assert len(w.policy.trained) == 2
        assert w.ledger.counts().given_up >= 2 and w.ledger.counts().lost == 0


async def test_ASY_05_and_CKP_03_resume_goes_on_with_the_next_prompt_and_repeats_none(tmp_path: Path) -> None:
    settings = {"data": rows(12), "prompts_per_step": 3, "max_epochs": 1, "checkpoint_every": 1}
    seen: list[str] = []
    for life in range(4):
        with world(tmp_path, steps=life + 1, resume_at=life, **settings) as w:
            await w.controller.run()
            seen += [name for names in w.trained_prompts() for name in names]
            assert w.ledger.counts().lost == 0
    assert sorted(seen) == sorted(f"p{i}" for i in range(12))


async def test_a_crash_after_training_but_before_a_checkpoint_trains_the_same_prompts_again(
    tmp_path: Path,
) -> None:
    settings = {"data": rows(12), "prompts_per_step": 3, "max_epochs": 1, "max_staleness": 0}
    with world(tmp_path, steps=2, **settings) as w:
        await w.controller.run()  # as if no checkpoint had been written after step 1
    with world(tmp_path, steps=4, resume_at=1, **settings) as w:
        await w.controller.run()
        counts = w.ledger.counts()
    assert len(w.policy.trained) == 3
    assert (counts.consumed, counts.consumed_twice, counts.lost) == (24, 0, 0)
    assert counts.voided == 6


async def test_ASY_07_a_cancelled_member_fails_its_group_and_gives_the_credit_back(tmp_path: Path) -> None:
    cancelled: list[str] = []

    async def cancel_one(identity: Identity, answer: Generation) -> None:
        if not cancelled:
            cancelled.append(identity.attempt)
            answer.failures[1] = retryable(Reason.WORKER_LOST, "cancelled inside the environment")
            del answer.samples[1]

    with world(tmp_path, generations_per_prompt=4) as w:
        w.rollout.behave = cancel_one
        await w.controller.run()
        assert w.admission.running == 0
        assert w.counters.count("attempts_infra_error") == 1
        assert all(len({s.trajectory_id for s in b.samples}) == 8 for b in w.policy.trained)
        assert not any(s.group_id in cancelled for b in w.policy.trained for s in b.samples)


def test_ASY_09_a_buffer_smaller_than_a_step_is_refused_with_both_numbers() -> None:
    with pytest.raises(OmnifleetError, match="4 groups, a step needs 6") as refusal:
        check_buffer(4, 6)
    assert refusal.value.knob == "trainer.buffer_groups"
    with pytest.raises(ValueError, match="buffer_groups 4 < prompts_per_step 6"):
        TrainerConfig(buffer_groups=4, prompts_per_step=6)


async def test_ASY_09_a_buffer_as_large_as_a_step_does_not_deadlock(tmp_path: Path) -> None:
    with world(tmp_path, steps=200, prompts_per_step=6, buffer_groups=6, max_staleness=1, data=rows(18)) as w:
        async with asyncio.timeout(120):
            await w.controller.run()
    assert len(w.policy.trained) == 200


async def test_ASY_10_no_wake_up_is_lost_between_pause_and_resume() -> None:
    admission = Admission(bound=10**6, batch=10, buffer=10**9, version=0, trained=0, ready=0)
    admitted = [0] * 4

    async def produce(index: int) -> None:
        while True:
            await admission.admit()
            admitted[index] += 1
            admission.returned()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        producers = [group.create_task(produce(index)) for index in range(4)]
        for cycle in range(10_000):
            admission.pause()
            if cycle % 3:
                await asyncio.sleep(0)
            admission.resume()
            if cycle % 5 == 0:
                await asyncio.sleep(0)
        before = list(admitted)
        async with asyncio.timeout(1):
            while not all(now > then for now, then in zip(admitted, before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        for producer in producers:
            producer.cancel()


async def test_ASY_11_and_STL_05_each_token_keeps_its_version_and_staleness_uses_the_oldest(
    tmp_path: Path,
) -> None:
    with world(tmp_path, resume_at=4, max_staleness=3, prompts_per_step=1) as w:
        await w.admission.admit()
        lease = w.prompts.lease(version=4, ttl_s=60)
        assert lease is not None
        group = group_of(lease, versions=(1, 1, 1, 3, 4, 4, 4, 4, 4))
        w.buffer.put(lease, group)
        forever = {"ended": lambda: False, "paused": lambda: False, "timeout": 0.05}
        (ready,) = await w.buffer.take(4, **forever)
        assert (ready.oldest_version, ready.newest_version) == (1, 4)
        batch = await w.batches.build([w.ledger.load_group(ready.id)], step=5, version=4)
        for sample in batch.samples:
            assert sample.mask == [1] * 9
            assert sample.lag == [3, 3, 3, 1, 0, 0, 0, 0, 0]
        with pytest.raises(OmnifleetError, match="0 of 1 groups"):
            await w.buffer.take(5, **forever)  # lag 4: too old now
        assert w.ledger.counts().expired == 1
        again = w.prompts.lease(version=5, ttl_s=60)
        assert again is not None and again.prompt_id == lease.prompt_id and again.attempt != lease.attempt


async def test_ASY_13_a_group_is_never_trained_short(tmp_path: Path) -> None:
    async def broken(identity: Identity, answer: Generation) -> None:
        if identity.prompt_id == "p1":
            answer.failures[2] = OmnifleetError(Reason.INVALID_REQUEST, "a tool call that cannot be parsed")
            del answer.samples[2]

    with world(
        tmp_path, data=rows(6), generations_per_prompt=4, max_epochs=1, attempts_per_prompt=2, steps=9
    ) as w:
        w.rollout.behave = broken
        await w.controller.run()
        counts = w.ledger.counts()
    sizes = {}
    for batch in w.policy.trained:
        for sample in batch.samples:
            sizes[sample.group_id] = sizes.get(sample.group_id, 0) + 1
    assert set(sizes.values()) == {4}
    assert counts.given_up == 1 and counts.failed == 2


async def test_ASY_15_every_batch_is_new_however_slow_the_producer_is(tmp_path: Path) -> None:
    async def slow(identity: Identity, answer: Generation) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    with world(tmp_path, steps=5) as w:
        w.rollout.behave = slow
        await w.controller.run()
    ids = [sample.trajectory_id for batch in w.policy.trained for sample in batch.samples]
    assert len(ids) == len(set(ids)) == 20
    assert [batch.step for batch in w.policy.trained] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("sampler", ["fifo", "freshest", "in_order"])
async def test_ASY_16_the_end_of_the_data_ends_the_run(tmp_path: Path, sampler: str) -> None:
    with world(tmp_path, data=rows(10), prompts_per_step=4, max_epochs=2, steps=100, sampler=sampler) as w:
        async with asyncio.timeout(20):
            assert await w.controller.run()
    assert len(w.policy.trained) == 5  # 20 prompts over both epochs, carried across the border


async def test_ASY_16_a_last_partial_batch_is_not_trained(tmp_path: Path) -> None:
    with world(tmp_path, data=rows(10), prompts_per_step=4, max_epochs=1, steps=100) as w:
        assert await w.controller.run()
    assert len(w.policy.trained) == 2


async def test_in_order_trains_in_the_order_of_the_data(tmp_path: Path) -> None:
    async def first_is_slow(identity: Identity, answer: Generation) -> None:
        if identity.prompt_id in ("p0", "p1", "p2"):
            for _ in range(50):
                await asyncio.sleep(0)

    with world(tmp_path, data=rows(12), steps=6, sampler="in_order", max_epochs=1, max_staleness=2) as w:
        w.rollout.behave = first_is_slow
        await w.controller.run()
        order = [name for names in w.trained_prompts() for name in names]
        expected = [f"p{i}" for i in np.random.default_rng((0, 0)).permutation(12)]
    assert order == expected


async def test_CKP_07_ready_groups_train_after_resume_without_new_generations(tmp_path: Path) -> None:
    with world(tmp_path, prompts_per_step=3, data=rows(12)) as w:
        # three rollouts finish, then the trainer dies before the first step
        done = asyncio.Event()
        w.buffer._sampler = lambda ready, needed, first: done.set() or [] if len(ready) == 6 else []
        task = asyncio.create_task(w.controller.run())
        await asyncio.wait_for(done.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        kept = {group.id for group in w.ledger.ready()}
    with world(tmp_path, prompts_per_step=3, data=rows(12), steps=2) as w:
        assert w.admission.capacity() == 0
        await w.controller.run()
        trained = {sample.group_id for batch in w.policy.trained for sample in batch.samples}
    assert trained == kept


async def test_CKP_06_nothing_is_sampled_before_the_fleet_confirms_the_resumed_weights(
    tmp_path: Path,
) -> None:
    """The servers hold version 7 of the life before; the trainer comes back at 5, beside a checkpoint that is half written."""
    with world(tmp_path, steps=5) as w:
        assert await w.controller.run()
    half = tmp_path / "checkpoints" / ".writing-6-ab-1"
    half.mkdir(parents=True)
    (half / "state.json").write_text("{}")
    assert latest_checkpoint(tmp_path / "checkpoints") is None, "a folder without its name is no checkpoint"
    told: list[tuple[int, int]] = []

    class Confirmed(Apart):
        def __init__(self, rollout: FakeRollout) -> None:
            self.rollout = rollout
            rollout.version = WeightVersion("run", "lineage-0", 7)

        async def refit(self) -> dict[str, float]:
            told.append((len(self.rollout.calls), self.rollout.version.number))
            return {}

    sampled: set[WeightVersion] = set()

    async def remember(identity: Identity, answer: Generation) -> None:
        sampled.update(span.version for reply in answer.samples.values() for span in reply.spans)

    with world(tmp_path, steps=7, resume_at=5, turns=Confirmed) as w:
        w.rollout.behave = remember
        assert await w.controller.run()
        assert told[0] == (0, 7), "no request before the first refit"
        assert {version.lineage for version in sampled} == {"lineage-1"}
        assert min(version.number for version in sampled) >= 5 and w.controller.step == 7
