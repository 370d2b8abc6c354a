"""The objective in the loop: message penalties, whitening over the step, and the reward's reachable maximum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from omnifleet.client.reward import ReachableMaximum, RewardClient
from omnifleet.config.load import load_recipe
from omnifleet.config.objective import ObjectiveConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Group
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.loop.batches import AdvantageRule
from omnifleet_trainer.server.assembly import _reachable
from tests.unit.ledger_samples import group_of
from tests.unit.loop_world import Row, World, world


async def built(w: World, objective: ObjectiveConfig, replies: list[list[tuple[str, float]]]) -> StepBatch:
    """A batch of one group for each list of (text, reward)."""
    w.batches._advantages = AdvantageRule(objective)
    groups = []
    for reply in replies:
        lease = w.prompts.lease(version=0, ttl_s=60)
        assert lease is not None
        group = group_of(lease, versions=(0, 0))
        whole = group.trajectories[0]
        groups.append(
            Group(
                group.id,
                group.prompt_id,
                [replace(whole, id=f"{group.id}/{i}", text=t, reward=r) for i, (t, r) in enumerate(reply)],
            )
        )
    return await w.batches.build(groups, step=1, version=0)


async def test_a_fault_costs_the_tokens_of_its_message(tmp_path: Path) -> None:
    objective = ObjectiveConfig.model_validate({"penalties": {"malformed_thinking": -2.0}})
    with world(tmp_path) as w:
        batch = await built(w, objective, [[("<think>a</think> 1", 1.0), ("<think>a 1", 0.0)]])
    good, bad = batch.samples
    assert good.penalties == ()
    assert bad.penalties == ((0, len(bad.token_ids), -2.0),)


async def test_equal_questions_about_different_pictures_are_groups_of_their_own(tmp_path: Path) -> None:
    """Padded prompt tokens say nothing of the picture: by them both prompts would share one baseline."""
    data = [Row("a", "how many?", (b"one",), "1"), Row("b", "how many?", (b"two",), "2")]
    objective = ObjectiveConfig(baseline="group_mean", std="none")
    with world(tmp_path, data=data) as w:
        batch = await built(w, objective, [[("1", 1.0), ("2", 0.0)], [("1", 0.0), ("2", 0.0)]])
    first, other = batch.samples[0], batch.samples[2]
    assert first.prompt_token_ids == other.prompt_token_ids and first.media != other.media
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5, 0.0, 0.0]


async def test_whitening_sees_all_groups_of_the_step(tmp_path: Path) -> None:
    objective = ObjectiveConfig(baseline="group_mean", std="none", whitening=True)
    with world(tmp_path) as w:
        batch = await built(w, objective, [[("a", 1.0), ("b", 0.0)], [("c", 1.0), ("d", 1.0)]])
    values = [sample.advantage for sample in batch.samples]
    assert values[0] == pytest.approx(-values[1]) and values[0] > 1
    assert values[2:] == [0.0, 0.0]


class Scorers:
    """Answers as the reward service does, or refuses."""

    def __init__(self, maximum: float | None) -> None:
        self._maximum = maximum

    async def reachable_maximum(self, scorers: Any, prompt_suffix: str = "") -> ReachableMaximum:
        if self._maximum is None:
            raise OmnifleetError(Reason.UNSUPPORTED, "scorer custom gives no examples")
        return ReachableMaximum(self._maximum, "<answer>1</answer>", "v1")


async def test_the_reachable_maximum_is_a_fact_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("cpu-tiny", ["objective.reward_scaling={source_max: 1, target_min: -1}"])
    caplog.set_level("INFO")
    facts = await _reachable(recipe, cast(RewardClient, Scorers(0.95)), "<think>")
    assert facts == {"reward_reachable": "0.9"}
    assert "at most 0.9" in caplog.text
    assert await _reachable(recipe, cast(RewardClient, Scorers(None)), "") == {}
    assert "not known" in caplog.text
