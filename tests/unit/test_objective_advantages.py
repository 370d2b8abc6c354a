"""Rewards of a step to advantages; a test for each trap of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from omnifleet.config.objective import ObjectiveConfig, OverlongShaping, RewardScaling
from omnifleet_trainer.objectives.advantages import group_advantages, rewards_differ
from omnifleet_trainer.objectives.assign import Scored, step_advantages
from omnifleet_trainer.objectives.messages import Fault, fault_of, penalty_of
from omnifleet_trainer.objectives.rewards import final_reward, overlong_penalty, reachable, scaled
from omnifleet_trainer.objectives.whitening import whitened
from tests.unit import objective_oracle as oracle


def scored(*rewards: float, group: str = "g", **settings: Any) -> list[Scored]:
    return [Scored(group, reward, **({"tokens": 4, "trained": 4} | settings)) for reward in rewards]


# ------------------------------------------------------------------ groups

REWARDS = st.lists(st.floats(-2, 2), min_size=2, max_size=8)
BASELINES = st.sampled_from(["leave_one_out", "group_mean"])
STDS = st.sampled_from(["leave_one_out", "sample", "population", "none"])


@given(REWARDS, BASELINES, STDS)
def test_groups_agree_with_the_oracle(rewards: list[float], baseline: Any, std: Any) -> None:
    assume(max(rewards) - min(rewards) > 1e-3)
    ours = group_advantages(rewards, [True] * len(rewards), baseline, std)
    assert ours == pytest.approx(oracle.advantages(rewards, baseline, std), rel=1e-6, abs=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=4), BASELINES, STDS, st.randoms(use_true_random=False))
def test_order_of_samples_and_of_groups_does_not_matter(
    groups: list[list[float]], baseline: Any, std: Any, random: Any
) -> None:
    objective = ObjectiveConfig(baseline=baseline, std=std)
    samples = [s for i, rewards in enumerate(groups) for s in scored(*rewards, group=f"g{i}")]
    order = list(range(len(samples)))
    random.shuffle(order)
    straight = step_advantages(samples, objective)
    shuffled = step_advantages([samples[i] for i in order], objective)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-12)


def test_rloo_and_dr_grpo_by_hand() -> None:
    rloo = ObjectiveConfig(surrogate="reinforce", std="none")
    assert step_advantages(scored(1, 0, 0, 0), rloo) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    dr_grpo = ObjectiveConfig(baseline="group_mean", std="none")
    assert step_advantages(scored(1, 0, 0, 0), dr_grpo) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_no_baseline_leaves_the_reward() -> None:
    plain = ObjectiveConfig(baseline="none", std="none")
    assert step_advantages(scored(1, 1) + scored(0.5, group="alone"), plain) == [1, 1, 0.5]


# ------------------------------------------------------------------ traps of the reference


def test_trap_groups_are_the_prompts_and_not_their_tokens() -> None:
    """Two pictures with one question and equal token ids: two groups, whatever their prompts look like."""
    objective = ObjectiveConfig(baseline="group_mean", std="none")
    samples = scored(1, 0, group="red") + scored(0, 0, group="blue")
    assert step_advantages(samples, objective) == [0.5, -0.5, 0, 0]


def test_trap_masked_samples_enter_no_baseline_unless_asked() -> None:
    samples = [*scored(1, 0), *scored(0, valid=False)]
    ours = ObjectiveConfig(std="none")
    assert step_advantages(samples, ours) == pytest.approx([1, -1, 0])
    theirs = ours.model_copy(update={"masked_in_baseline": True})
    assert step_advantages(samples, theirs) == pytest.approx([1, -0.5, -0.5])
    cut = [*scored(1, 0), *scored(0, truncated=True)]
    overlong = ours.model_copy(update={"overlong_filtering": True})
    assert step_advantages(cut, overlong) == pytest.approx([1, -1, 0])


@pytest.mark.parametrize("value", [0.95, 0.1, 1 / 3, 1e-9, 1e9])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_trap_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    for whitening in (False, True):
        objective = ObjectiveConfig(whitening=whitening)
        assert step_advantages(scored(*[value] * size), objective) == [0.0] * size
    assert not rewards_differ([value] * size)


def test_trap_a_reward_of_the_scorers_may_not_reach_one() -> None:
    """NeMo RL's CLEVR reward stops at 0.95; what the objective makes of the maximum is known before a run."""
    assert reachable(0.95, ObjectiveConfig()) == 0.95
    halved = ObjectiveConfig(reward_scaling=RewardScaling(source_max=1.0, target_min=-1.0, target_max=1.0))
    assert reachable(0.95, halved) == pytest.approx(0.9)


# ------------------------------------------------------------------ scaling, shaping, KL


def test_scaling_clamps_then_maps() -> None:
    scaling = RewardScaling(source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)
    assert [scaled(r, scaling) for r in (-5, 0, 0.5, 1, 2, 9)] == pytest.approx([-1, -1, -0.5, 0, 1, 1])
    assert scaled(7.5, None) == 7.5


def test_dapo_overlong_punishment() -> None:
    shaping = OverlongShaping(max_tokens=100, buffer_tokens=20, penalty=0.5)
    lengths = (0, 80, 85, 90, 100, 130)
    assert [overlong_penalty(n, shaping) for n in lengths] == pytest.approx([0, 0, -0.125, -0.25, -0.5, -0.5])


def test_truncated_replies_keep_a_part_of_their_reward() -> None:
    objective = ObjectiveConfig.model_validate({"reward_shaping": {"truncated_factor": 0.25}})
    assert final_reward(0.8, tokens=5, truncated=True, objective=objective) == pytest.approx(0.2)
    assert final_reward(0.8, tokens=5, truncated=False, objective=objective) == 0.8


def test_kl_in_the_reward() -> None:
    objective = ObjectiveConfig(baseline="group_mean", std="none", kl_coefficient=0.1, kl_in="reward")
    samples = [replace(s, kl=kl) for s, kl in zip(scored(1, 1), (2.0, 0.0), strict=True)]
    assert step_advantages(samples, objective) == pytest.approx([-0.1, 0.1])


# ------------------------------------------------------------------ whitening


def test_whitening_by_hand() -> None:
    """Tokens 1, 1, -1, -1: unbiased variance 4 / 3."""
    assert whitened([1.0, -1.0], [2, 2]) == pytest.approx([math.sqrt(3) / 2, -math.sqrt(3) / 2])
    assert whitened([1.0, 5.0], [3, 0]) == [0.0, 5.0]
    assert whitened([2.0], [0]) == [2.0]


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 5)), min_size=2, max_size=8))
def test_whitened_tokens_have_mean_zero_and_deviation_one(pairs: list[tuple[float, int]]) -> None:
    values, tokens = [a for a, _ in pairs], [n for _, n in pairs]
    spread = np.repeat(values, tokens)
    assume(len(spread) > 1 and spread.std() > 1e-2)
    found = np.repeat(whitened(values, tokens), tokens)
    assert found.mean() == pytest.approx(0, abs=1e-9)
    assert found.std(ddof=1) == pytest.approx(1, rel=1e-9)


def test_reinforce_plus_plus_compares_groups_with_each_other() -> None:
    objective = ObjectiveConfig(baseline="group_mean", std="none", whitening=True)
    samples = scored(1, 0, group="a") + scored(1, 1, group="b")
    # centred: 0.5, -0.5, 0, 0 over four tokens each: variance (8 x 0.25) / 15
    deviation = math.sqrt(8 * 0.25 / 15)
    assert step_advantages(samples, objective) == pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0])


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("plain", None),
        ("<think>a</think> b", None),
        ("<think>a", Fault.MALFORMED_THINKING),
        ("a</think>", Fault.MALFORMED_THINKING),
        ("</think><think>", Fault.MALFORMED_THINKING),
        ("<think>a</think><think>b</think>", Fault.MALFORMED_THINKING),
        ('<tool_call>{"name": "click", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "click"}', Fault.INVALID_TOOL_CALL),
        ("<tool_call>click()</tool_call>", Fault.INVALID_TOOL_CALL),
        ('<tool_call>{"arguments": {}}</tool_call>', Fault.INVALID_TOOL_CALL),
        ("<think>a<tool_call>[]</tool_call>", Fault.INVALID_TOOL_CALL),
    ],
)
def test_faults_of_messages(text: str, fault: Fault | None) -> None:
    assert fault_of(text) is fault


def test_a_template_may_have_opened_the_think_tag() -> None:
    assert fault_of("a</think> b", opened=True) is None
    assert fault_of("a", opened=True) is Fault.MALFORMED_THINKING


def test_penalties_are_off_unless_set() -> None:
    objective = ObjectiveConfig.model_validate({"penalties": {"malformed_thinking": -2.0}})
    assert penalty_of(Fault.MALFORMED_THINKING, objective.penalties) == -2.0
    assert penalty_of(Fault.INVALID_TOOL_CALL, objective.penalties) is None
    assert penalty_of(None, objective.penalties) is None
