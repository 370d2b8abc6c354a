"""Rewards of one group to advantages. Plain float64; no tensors in, none out.

GRPO (2402.03300): baseline = group_mean, std = population or sample. Dr.GRPO (2503.20783): group_mean, none.
RLOO (2402.14740): leave_one_out, none. NeMo RL's `grpo` estimator, the default: leave_one_out for both, epsilon 1e-6,
a deviation of zero divides nothing. One change: rewards are compared exactly, so that equal rewards give exactly 0,
where the float32 formula leaves advantages of up to 2e-4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Baseline = Literal["leave_one_out", "group_mean", "none"]
Std = Literal["leave_one_out", "sample", "population", "none"]
EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float],
    valid: Sequence[bool],
    baseline: Baseline = "leave_one_out",
    std: Std = "leave_one_out",
    *,
    parity: bool = False,
) -> list[float]:
    """Advantages of one group: A_i = (r_i - b_i) / (s_i + 1e-6), undivided where s_i = 0.

    rewards, valid: [G]. b_i is the mean of the other samples (`leave_one_out`) or of all (`group_mean`); with `none` it
    is 0, and A_i is the reward, also in groups of one or of equal rewards. s_i is the unbiased deviation of the other
    samples (`leave_one_out`), of all (`sample`), the biased one of all (`population`), or absent (`none`).
    Samples that are not valid get 0 and enter no baseline; with `parity` they count like the others, as in NeMo RL,
    whose valid mask is all ones.
    A sample without peers gets 0. Raises ValueError for other lengths or a reward that is not finite.
    """
    if len(rewards) != len(valid):
        raise ValueError(f"{len(rewards)} rewards for {len(valid)} valid flags")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite: {list(rewards)}")
    kept = [i for i in range(len(rewards)) if parity or valid[i]]
    advantages = [0.0] * len(rewards)
    if baseline == "none":
        for i in kept:
            advantages[i] = rewards[i]
        return advantages
    if len(kept) < 2 or _all_equal([rewards[i] for i in kept]):
        return advantages
    for i in kept:
        everyone = [rewards[j] for j in kept]
        others = [rewards[j] for j in kept if j != i]
        centred = rewards[i] - _mean(others if baseline == "leave_one_out" else everyone)
        deviation = _deviation(others if std == "leave_one_out" else everyone, std)
        advantages[i] = centred / (deviation + EPSILON) if deviation > 0 else centred
    return advantages


def has_signal(advantages: Sequence[float]) -> bool:
    """False for a group that moves nothing: all its advantages are 0."""
    return any(advantage != 0 for advantage in advantages)


def rewards_differ(rewards: Sequence[float]) -> bool:
    """False for a group that dynamic sampling (DAPO) drops: all its rewards are equal."""
    return not _all_equal(rewards)


def _all_equal(values: Sequence[float]) -> bool:
    return all(value == values[0] for value in values)


def _mean(values: Sequence[float]) -> float:
    return values[0] if _all_equal(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float], std: Std) -> float:
    """Standard deviation; 0 for equal values, and for one value (its unbiased deviation is undefined)."""
    if std == "none" or len(values) < 2 or _all_equal(values):
        return 0.0
    mean = _mean(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - (std != "population")))
