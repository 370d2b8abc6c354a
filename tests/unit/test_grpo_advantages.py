"""Advantages against hand-computed values and the reference formula; field cases GRP-01, 02, 04, 06."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet_trainer.objectives.advantages import group_advantages, has_signal

REWARDS = st.lists(st.sampled_from([0.0, 0.15, 0.2, 0.8, 0.95, 1.0]), min_size=1, max_size=16)


def advantages(
    rewards: list[float], baseline: str = "leave_one_out", std: str = "leave_one_out"
) -> list[float]:
    return group_advantages(rewards, [True] * len(rewards), baseline, std)  # type: ignore[arg-type]


def reference(rewards: list[float], valid: list[bool]) -> list[float]:
    """NeMo RL's formula in its own terms, float64: s^2 = (sum r^2 / m - b^2) m / (m - 1) over the others."""
    r, v = np.asarray(rewards, np.float64), np.asarray(valid, np.float64)
    out = []
    for i in range(len(r)):
        w = v.copy()
        w[i] = 0
        m = w.sum()
        if v.sum() <= 1 or not valid[i]:
            out.append(0.0)
            continue
        b = (r * w).sum() / m
        variance = ((r * r * w).sum() / m - b * b) * (m / (m - 1)) if m > 1 else 0.0
        s = math.sqrt(max(variance, 0.0))
        out.append((r[i] - b) / (s + 1e-6) if s > 1e-6 else r[i] - b)
    return out


def test_grp_01_a_group_of_one_has_advantage_zero() -> None:
    assert advantages([1.0]) == [0.0]
    assert advantages([1.0], "group_mean", "sample") == [0.0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, 0.1 + 0.2])
@pytest.mark.parametrize("size", [2, 4, 7, 8, 16])
@pytest.mark.parametrize("std", ["leave_one_out", "sample", "population", "none"])
def test_grp_02_equal_rewards_give_exactly_zero(value: float, size: int, std: str) -> None:
    result = advantages([value] * size, std=std)
    assert result == [0.0] * size
    assert not has_signal(result)


def test_grp_04_groups_are_normalised_alone() -> None:
    assert advantages([1.0, 0.0], "group_mean", "none") == [0.5, -0.5]
    assert advantages([0.0, 0.0], "group_mean", "none") == [0.0, 0.0]
    assert advantages([1.0, 0.0], "group_mean", "population") == pytest.approx([1, -1], rel=1e-3)
    assert advantages([1.0, 0.0], "group_mean", "sample") == pytest.approx([0.7071068, -0.7071068], rel=1e-3)


def test_grp_06_each_normalisation_is_what_its_name_says() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert advantages(rewards, "group_mean", "none") == pytest.approx([0.75] + [-0.25] * 3)
    assert advantages(rewards, "group_mean", "sample") == pytest.approx([1.5] + [-0.5] * 3, rel=1e-3)
    assert advantages(rewards, "group_mean", "population") == pytest.approx(
        [1.7320508] + [-0.5773503] * 3, rel=1e-3
    )


def test_a_single_winner_is_not_normalised_but_the_losers_are() -> None:
    """NeMo RL's leave-one-out: the winner's peers are equal, so s = 0 and A = r - b."""
    winner, *losers = advantages([1.0, 0.0, 0.0, 0.0])
    assert winner == 1.0
    # A loser's peers are 1, 0, 0: b = 1/3, s = sqrt(1/3).
    assert losers == pytest.approx([-(1 / 3) / (math.sqrt(1 / 3) + 1e-6)] * 3)


def test_two_samples_are_never_normalised() -> None:
    assert advantages([0.2, 1.0]) == pytest.approx([-0.8, 0.8])


def test_masked_samples_stay_out_of_baselines_unless_parity_is_asked() -> None:
    rewards, valid = [1.0, 0.0, 0.5, 9.0], [True, True, True, False]
    assert group_advantages(rewards, valid) == pytest.approx([*advantages(rewards[:3]), 0.0])
    assert group_advantages(rewards, valid, parity=True) == advantages(rewards)
    assert group_advantages([1.0, 0.0], [True, False]) == [0.0, 0.0]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, math.nan])
    with pytest.raises(ValueError, match="valid flags"):
        group_advantages([1.0], [])


@given(REWARDS, st.data())
def test_agrees_with_the_reference_formula(rewards: list[float], data: st.DataObject) -> None:
    valid = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    assert group_advantages(rewards, valid) == pytest.approx(reference(rewards, valid), abs=1e-6)


@given(REWARDS, st.randoms(use_true_random=False))
def test_a_permutation_of_rewards_permutes_advantages(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    before = advantages(rewards)
    assert advantages([rewards[i] for i in order]) == pytest.approx([before[i] for i in order])
