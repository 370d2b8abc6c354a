"""Corrections for the policy that sampled: hand-computed values, and the oracle on random samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnifleet.config.objective import ObjectiveConfig, RejectionConfig
from omnifleet_trainer.objectives.corrections.rejection import accepted
from omnifleet_trainer.objectives.corrections.weights import importance_weights, weight_sums
from tests.unit import objective_oracle as oracle

LN2 = math.log(2)


def keeps(
    gaps: list[list[float]], *rules: dict[str, Any], mask: list[list[int]] | None = None
) -> list[float]:
    values = torch.tensor(gaps, dtype=torch.float64)
    trained = torch.ones_like(values) if mask is None else torch.tensor(mask, dtype=torch.float64)
    return accepted(
        values, torch.zeros_like(values), trained, [RejectionConfig(**rule) for rule in rules]
    ).tolist()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"rule": "sequence", "max": 4.0}, [1.0, 1.0, 0.0]),  # products 1, 4, 8
        ({"rule": "sequence", "min": 2.0, "max": 8.0}, [0.0, 1.0, 1.0]),
        ({"rule": "geometric", "max": 1.9}, [1.0, 1.0, 0.0]),  # roots 1, 2^(2/3) = 1.587, 2
        ({"rule": "geometric", "min": 1.5, "max": 1.9}, [0.0, 1.0, 0.0]),
        ({"rule": "k2", "max": 0.2}, [1.0, 1.0, 0.0]),  # 2/3 and 3/3 of (ln 2)^2 / 2 = 0.2402: 0.1601, 0.2402
        (
            {"rule": "k3", "max": 0.25},
            [1.0, 1.0, 0.0],
        ),  # 2/3 and 3/3 of 2 - 1 - ln 2 = 0.3069: 0.2046, 0.3069
        ({"rule": "veto", "min": 1e-4, "max": 1.5}, [1.0, 0.0, 0.0]),
        ({"rule": "veto", "min": 1e-4, "max": 100.0}, [1.0, 1.0, 1.0]),
    ],
)
def test_rejection_rules(rule: dict[str, Any], expected: list[float]) -> None:
    assert keeps([[0.0, 0.0, 0.0], [LN2, LN2, 0.0], [LN2, LN2, LN2]], rule) == expected


def test_a_sample_must_pass_every_rule_and_masked_tokens_are_not_asked() -> None:
    veto, geometric = {"rule": "veto", "min": 1e-4, "max": 100.0}, {"rule": "geometric", "max": 2.0}
    gaps = [[0.0, 10.0], [0.0, 10.0], [LN2, 2.0]]
    assert keeps(gaps, veto, geometric, mask=[[1, 1], [1, 0], [1, 1]]) == [0.0, 1.0, 0.0]
    assert keeps(gaps, veto, mask=[[1, 1], [0, 0], [1, 1]]) == [0.0, 1.0, 1.0]


def test_a_long_sample_overflows_no_product() -> None:
    assert keeps([[5.0] * 1000], {"rule": "sequence", "max": 2.0}) == [0.0]
    assert keeps([[-5.0] * 1000], {"rule": "sequence", "max": 2.0}) == [1.0]
    assert keeps([[-5.0] * 1000], {"rule": "sequence", "min": 0.5, "max": 2.0}) == [0.0]


RULES = st.builds(
    lambda rule, low, high: RejectionConfig(
        rule=rule, min=0.0 if rule in ("k2", "k3") else low, max=high / 20 if rule in ("k2", "k3") else high
    ),
    st.sampled_from(["sequence", "geometric", "k2", "k3", "veto"]),
    st.floats(0.0, 0.95),
    st.floats(1.01, 3.0),
)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), RULES, st.integers(0, 3))
def test_rules_agree_with_the_oracle(gap: list[float], rule: RejectionConfig, padding: int) -> None:
    ratio = math.exp(sum(gap) / len(gap))
    assume(all(abs(x - bound) > 1e-9 for x in (ratio, *map(math.exp, gap)) for bound in (rule.min, rule.max)))
    values = torch.tensor([gap + [99.0] * padding], dtype=torch.float64)
    mask = torch.tensor([[1.0] * len(gap) + [0.0] * padding])
    assert accepted(values, torch.zeros_like(values), mask, [rule]).tolist() == [
        float(oracle.passes(gap, rule))
    ]


def test_normalised_weights_have_mean_one_over_the_update() -> None:
    objective = ObjectiveConfig(truncation="tis", truncation_max=2.0, weight_normalisation=True)
    prev = torch.tensor([[LN2, 2 * LN2], [0.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    values = importance_weights(prev, torch.zeros_like(prev), mask, objective).values
    assert values[mask > 0].tolist() == pytest.approx([2.0, 2.0, 1.0])
    assert weight_sums(values, mask, objective) == pytest.approx((5.0, 3.0))
    sequence = objective.model_copy(update={"weight_level": "sequence", "truncation": "none"})
    values = importance_weights(prev, torch.zeros_like(prev), mask, sequence).values
    assert weight_sums(values, mask, sequence) == pytest.approx((8.0 + 1.0, 2.0))


def test_truncations_say_on_which_side_they_bit() -> None:
    prev = torch.log(torch.tensor([[0.5, 1.0, 4.0]], dtype=torch.float64))
    bounds = {"truncation_min": 0.8, "truncation_max": 2.0}
    for kind, values in (("tis", [0.8, 1.0, 2.0]), ("icepop", [0.0, 1.0, 0.0])):
        found = importance_weights(
            prev,
            torch.zeros_like(prev),
            torch.ones_like(prev),
            ObjectiveConfig.model_validate({"truncation": kind, **bounds}),
        )
        assert found.values[0].tolist() == pytest.approx(values)
        assert found.low[0].tolist() == [True, False, False]
        assert found.high[0].tolist() == [False, False, True]
