"""The objective's settings: what does not fit together is said by name, value, what is allowed, and knob."""

from __future__ import annotations

from typing import Any

import pytest

from omnifleet.config.load import load_recipe
from omnifleet.errors import OmnifleetError, Reason


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.surogate=cispo"], "unknown key 'objective.surogate', did you mean 'surrogate'"),
        (["objective.surrogate=grpo"], "Input should be 'clipped', 'cispo'"),
        (["objective.ratio=sequence"], "set objective.reduction"),
        (
            ["objective.surrogate=cispo", "objective.ratio=sequence_token"],
            "objective.ratio = sequence_token needs",
        ),
        (
            ["objective.surrogate=sapo", "objective.dual_clip=3"],
            "dual_clip = 3.0 bounds surrogate = clipped only",
        ),
        (["objective.reduction=constant"], "set objective.reduction_tokens"),
        (["objective.reduction_tokens=8"], "reduction = constant and reduction_tokens go together"),
        (["objective.surrogate=topr"], "set objective.importance_correction = false"),
        (["objective.old_policy=generation"], "set objective.importance_correction = false"),
        (
            [
                "objective.importance_correction=false",
                "objective.truncation=none",
                "objective.weight_normalisation=true",
            ],
            "weight_normalisation = true needs importance_correction",
        ),
        (["objective.truncation_min=3"], "truncation_min 3.0 > truncation_max 2.0"),
        (["objective.baseline=none"], "set objective.std = none"),
        (
            ["objective.baseline=none", "objective.std=none", "objective.dynamic_sampling=true"],
            "dynamic_sampling",
        ),
        (["objective.kl_in=reward"], "set objective.kl_coefficient"),
        (
            [
                "objective.kl_in=reward",
                "objective.kl_coefficient=0.1",
                "objective.kl_on_policy_approximation=true",
            ],
            "set objective.kl_in = loss",
        ),
        (["objective.rejection=[{rule: geometric, min: 2, max: 1}]"], "min 2.0 > max 1.0"),
        (["objective.rejection=[{rule: k3, min: 0.1, max: 1}]"], "has no lower bound"),
        (["objective.rejection=[{rule: median, max: 1}]"], "objective.rejection.0.rule"),
        (
            ["objective.reward_scaling={source_min: 1, source_max: 1}"],
            "source_min 1.0 must be below source_max 1.0",
        ),
        (
            ["objective.reward_shaping={overlong: {max_tokens: 16, buffer_tokens: 32}}"],
            "buffer_tokens 32 > max_tokens 16",
        ),
        (
            ["objective.reward_shaping={overlong: {max_tokens: 64, buffer_tokens: 8}}"],
            "64 > sampling.max_tokens 16",
        ),
        (["objective.penalties={malformed_thinking: 1}"], "objective.penalties.malformed_thinking = 1"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(OmnifleetError) as refused:
        load_recipe("cpu-tiny", overrides)
    assert refused.value.reason is Reason.INVALID_CONFIG
    assert message in refused.value.message


def test_two_problems_are_told_at_once() -> None:
    with pytest.raises(OmnifleetError) as refused:
        load_recipe("cpu-tiny", ["objective.ratio=sequence", "objective.kl_in=reward"])
    assert "objective.reduction" in refused.value.message
    assert "objective.kl_coefficient" in refused.value.message


def test_a_rule_stacks_on_another() -> None:
    settings: Any = "[{rule: geometric, min: 0.99, max: 1.01}, {rule: veto, min: 1.0e-4, max: 100}]"
    recipe = load_recipe("cpu-tiny", [f"objective.rejection={settings}"])
    assert [rule.rule for rule in recipe.objective.rejection] == ["geometric", "veto"]
    assert recipe.objective.rejects_samples
