"""Dynamic sampling in the loop: a group without a signal takes no place in a step, and does not go on for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet.client.reward import ItemScore
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.loop.signal import SignalFilter
from tests.unit.loop_world import world


def equal_for_odd_prompts(prompts: dict[str, str]):  # type: ignore[no-untyped-def]
    """Scores 0.95 for every reply to an odd prompt."""

    def behave(scores: list[ItemScore]) -> list[ItemScore]:
        prompt = prompts.get(scores[0].id.partition("/")[0], "p0")  # held-out prompts are nobody's attempt
        if int(prompt.removeprefix("p")) % 2:
            return [ItemScore(s.id, 0.95, None, {}, None, "exact@1") for s in scores]
        return scores

    return behave


async def test_groups_of_equal_rewards_are_replaced(tmp_path: Path) -> None:
    with world(tmp_path, steps=3, max_staleness=1) as w:
        w.controller._parts.rollouts._keeps = SignalFilter(prompts_per_step=2, limit=10)
        prompts: dict[str, str] = {}

        async def note(identity, generation):  # type: ignore[no-untyped-def]
            prompts[identity.attempt] = identity.prompt_id

        w.rollout.behave, w.reward.behave = note, equal_for_odd_prompts(prompts)
        assert await w.controller.run()
        trained = [prompt for step in w.trained_prompts() for prompt in step]
        assert len(trained) == 6 and not any(int(p[1:]) % 2 for p in trained)
        assert w.counters.count("groups_without_signal") >= 5
        assert w.ledger.counts().consumed_twice == 0
        assert all(any(s.advantage for s in batch.samples) for batch in w.policy.trained)


async def test_a_task_without_any_signal_ends_the_run_with_a_word(tmp_path: Path) -> None:
    with world(tmp_path, steps=3) as w:
        w.controller._parts.rollouts._keeps = SignalFilter(prompts_per_step=2, limit=2)
        w.reward.behave = lambda scores: [ItemScore(s.id, 1.0, None, {}, None, "x@1") for s in scores]
        with pytest.raises(OmnifleetError, match="5 groups in a row had equal rewards") as ended:
            await w.controller.run()
        assert ended.value.reason is Reason.LIMIT_EXCEEDED
        assert "dynamic_sampling_limit" in ended.value.knob
