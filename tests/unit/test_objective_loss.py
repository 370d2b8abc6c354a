"""Every objective against an implementation of its own (objective_oracle.py): values, gradients, invariances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.corrections.weights import importance_weights, weight_sums
from omnifleet_trainer.objectives.loss import policy_loss
from omnifleet_trainer.objectives.tensors import Normalisers
from tests.unit import objective_oracle as oracle

_OWN = {"importance_correction": False}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"std": "none", "reduction": "constant", "reduction_tokens": 8},
    "dapo": {"clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"ratio": "sequence", "reduction": "sequence", "clip_low": 0.05, "clip_high": 0.08},
    "gspo_token": {"ratio": "sequence_token", "reduction": "sequence", "clip_low": 0.05, "clip_high": 0.08},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    "decoupled_ppo": {"truncation": "tis", "truncation_max": 1.1},
    "ppo_bypass": {"old_policy": "generation", **_OWN},
    "aipo": {"surrogate": "aipo", "aipo": {"cap": 1.1}, **_OWN},
    "sapo": {"surrogate": "sapo", "reduction": "sequence", **_OWN},
    "topr": {"surrogate": "topr", **_OWN},
    "dppo_tv": {"surrogate": "dppo_tv", "dppo": {"delta_low": 0.02, "delta_high": 0.02, "cap": 1.1}, **_OWN},
    "rloo": {"surrogate": "reinforce", "std": "none", **_OWN},
    "tis_sequence": {"weight_level": "sequence", "truncation": "tis", "truncation_min": 0.5},
    "icepop": {"truncation": "icepop", "truncation_min": 0.9, "truncation_max": 1.1},
    "seq_mask_tis": {"truncation": "seq-mask-tis", "truncation_min": 0.95, "truncation_max": 1.05},
    "normalised": {"truncation": "tis", "truncation_max": 1.05, "weight_normalisation": True},
    "normalised_sequence": {"weight_level": "sequence", "weight_normalisation": True},
    "kl_k1": {"kl_coefficient": 0.3, "kl_type": "k1"},
    "kl_k2": {"kl_coefficient": 0.3, "kl_type": "k2", "reduction": "sequence"},
    "kl_k3": {"kl_coefficient": 0.3},
    "kl_k3_on_policy": {"kl_coefficient": 0.3, "kl_on_policy_approximation": True},
}
PER_TOKEN = ("current", "prev", "generation", "reference", "advantages", "mask")
NAMES = st.sampled_from(sorted(OBJECTIVES))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prev = -random.exponential(1.0, (rows, width))
    return {
        "current": prev + random.normal(0, 0.15, (rows, width)),
        "prev": prev,
        "generation": prev + random.normal(0, 0.1, (rows, width)),
        "reference": prev + random.normal(0, 0.2, (rows, width)),
        "advantages": np.repeat(random.normal(0, 1, (rows, 1)), width, 1),
        "mask": random.integers(0, 2, (rows, width)) * random.integers(0, 2, (rows, 1)),
    }


def normalisers_of(case: dict[str, Any], objective: ObjectiveConfig) -> Normalisers:
    mask = torch.tensor(case["mask"], dtype=torch.float64)
    weight = 1.0
    if objective.weight_normalisation:
        values = importance_weights(
            torch.tensor(case["prev"]), torch.tensor(case["generation"]), mask, objective
        ).values
        total, count = weight_sums(values, mask, objective)
        weight = total / count if total > 0 else 1.0
    return Normalisers(float(mask.sum()), float((mask.sum(-1) > 0).sum()), weight)


def run(
    case: dict[str, Any], objective: ObjectiveConfig, cuts: list[list[int]] | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient, summed over micro-batches of the given rows."""
    whole = normalisers_of(case, objective)
    current = torch.tensor(case["current"], dtype=torch.float64, requires_grad=True)
    value = 0.0
    for rows in cuts or [list(range(len(case["current"])))]:
        part = {name: torch.tensor(case[name][rows], dtype=torch.float64) for name in PER_TOKEN[1:]}
        loss = policy_loss(
            current=current[rows],
            prev=part["prev"],
            generation=part["generation"],
            reference=part["reference"],
            advantages=part["advantages"],
            token_mask=part["mask"],
            sample_mask=torch.ones(len(rows), dtype=torch.float64),
            normalisers=whole,
            objective=objective,
        )
        loss.value.backward()  # type: ignore[no-untyped-call]
        value += loss.value.item()
    assert current.grad is not None
    return value, current.grad


@settings(deadline=None, max_examples=150)
@given(cases(), NAMES)
def test_values_and_gradients_agree_with_the_oracle(case: dict[str, Any], name: str) -> None:
    objective = ObjectiveConfig(**OBJECTIVES[name])
    value, gradient = run(case, objective)
    if not case["mask"].any():
        assert value == 0.0 and not gradient.any()
        return
    expected, slopes = oracle.loss_and_gradient(case, objective)
    assert value == pytest.approx(expected, rel=1e-7, abs=1e-9)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-6, atol=1e-9)


@settings(deadline=None)
@given(cases(), NAMES, st.randoms(use_true_random=False))
def test_order_micro_batches_and_shards_do_not_matter(case: dict[str, Any], name: str, random: Any) -> None:
    """A shard is a set of rows with the counts of the whole: gradients of shards add up, as all-reduce adds them."""
    objective = ObjectiveConfig(**OBJECTIVES[name])
    rows = list(range(len(case["current"])))
    random.shuffle(rows)
    cuts: list[list[int]] = [[]]
    for row in rows:
        cuts[-1].append(row)
        if random.random() < 0.5:
            cuts.append([])
    value, gradient = run(case, objective)
    cut_value, cut_gradient = run(case, objective, [cut for cut in cuts if cut])
    assert cut_value == pytest.approx(value, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(cut_gradient.numpy(), gradient.numpy(), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(cases(), NAMES, st.integers(1, 4), st.sampled_from([0.0, 700.0, -1e30, float("nan"), float("inf")]))
def test_padding_does_not_matter_whatever_stands_in_it(
    case: dict[str, Any], name: str, columns: int, garbage: float
) -> None:
    objective = ObjectiveConfig(**OBJECTIVES[name])
    padded = {
        key: np.pad(np.asarray(case[key], float), ((0, 0), (0, columns)), constant_values=garbage)
        for key in PER_TOKEN
    }
    padded["mask"] = np.pad(case["mask"], ((0, 0), (0, columns)))
    value, gradient = run(case, objective)
    padded_value, padded_gradient = run(padded, objective)
    assert padded_value == pytest.approx(value, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(
        padded_gradient.numpy(), np.pad(gradient.numpy(), ((0, 0), (0, columns))), rtol=1e-9, atol=1e-12
    )


@settings(deadline=None)
@given(cases(), NAMES)
def test_masked_rows_do_not_matter(case: dict[str, Any], name: str) -> None:
    objective = ObjectiveConfig(**OBJECTIVES[name])
    kept = np.flatnonzero(case["mask"].any(1))
    value, _ = run(case, objective)
    if not len(kept):
        assert value == 0.0
        return
    alone, _ = run({key: case[key][kept] for key in PER_TOKEN}, objective)
    assert alone == pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("apart", [30.0, -30.0, 500.0, -500.0])
def test_gradients_stay_finite_far_from_the_sampler(name: str, apart: float) -> None:
    """Logprobs of -500 and ratios of e^500: bounded by the clamps, never NaN."""
    near = np.full((2, 3), -1.0)
    far = near - abs(apart)
    case = {
        "current": far if apart < 0 else near,
        "prev": near if apart < 0 else far,
        "generation": near if apart < 0 else far,
        "reference": near if apart < 0 else far,
        "advantages": np.array([[1.0] * 3, [-1.0] * 3]),
        "mask": np.ones((2, 3)),
    }
    value, gradient = run(case, ObjectiveConfig(**OBJECTIVES[name]))
    assert np.isfinite(value) and torch.isfinite(gradient).all()


def one(objective: dict[str, Any], *, current: float, generation: float, a: float) -> tuple[float, float]:
    """Loss and gradient of a batch of one token; prev = generation."""
    case = {
        "current": np.array([[current]]),
        "prev": np.array([[generation]]),
        "generation": np.array([[generation]]),
        "reference": np.array([[generation]]),
        "advantages": np.array([[a]]),
        "mask": np.ones((1, 1)),
    }
    value, gradient = run(case, ObjectiveConfig(**objective))
    return value, gradient.item()


LN2, LN4 = np.log(2.0), np.log(4.0)


@pytest.mark.parametrize(
    ("objective", "current", "generation", "a", "loss", "slope"),
    [
        # CISPO: r = 2, clipped to 1.2: the value is the weight's, and so is the gradient
        (OBJECTIVES["cispo"], -LN2, -LN4, 1.0, 1.2 * LN2, -1.2),
        # ... and r = 1/2 stays 1/2, since the lower side is open
        (OBJECTIVES["cispo"], -LN4, -LN2, 1.0, 0.5 * LN4, -0.5),
        # AIPO: min(2, 1.1)
        (OBJECTIVES["aipo"], -LN2, -LN4, 1.0, 1.1 * LN2, -1.1),
        (OBJECTIVES["aipo"], -LN4, -LN2, -1.0, -0.5 * LN4, 0.5),
        # SAPO: f(1) = 2 / tau, f'(1) = 1 for every tau
        (OBJECTIVES["sapo"], -1.0, -1.0, 1.0, -2.0, -1.0),
        (OBJECTIVES["sapo"], -1.0, -1.0, -1.0, 2 / 1.05, 1.0),
        # TOPR: a good reply in full, a bad one only as far as it is still likely
        (OBJECTIVES["topr"], -LN4, -LN2, 1.0, LN4, -1.0),
        (OBJECTIVES["topr"], -LN4, -LN2, -1.0, -0.5 * LN4, 0.5),
        (OBJECTIVES["topr"], -LN2, -LN4, -1.0, -LN2, 1.0),
        # DPPO-TV: from 1/4 to 1/2 is 0.25 > 0.02: dropped while it goes the advantage's way, kept against it
        (OBJECTIVES["dppo_tv"], -LN2, -LN4, 1.0, 0.0, 0.0),
        (OBJECTIVES["dppo_tv"], -LN2, -LN4, -1.0, -1.1 * LN2, 1.1),
        (OBJECTIVES["dppo_tv"], -LN4, -LN2, -1.0, 0.0, 0.0),
        (OBJECTIVES["dppo_tv"], -LN4, -LN2, 1.0, 0.5 * LN4, -0.5),
        # REINFORCE
        (OBJECTIVES["rloo"], -LN2, -LN4, 2.0, 2 * LN2, -2.0),
        # PPO with the sampler as old: r = 2, clipped
        (OBJECTIVES["ppo_bypass"], -LN2, -LN4, 1.0, -1.2, 0.0),
        (OBJECTIVES["ppo_bypass"], -LN2, -LN4, -1.0, 2.0, 2.0),
    ],
)
def test_hand_computed(
    objective: dict[str, Any], current: float, generation: float, a: float, loss: float, slope: float
) -> None:
    assert one(objective, current=current, generation=generation, a=a) == pytest.approx(
        (loss, slope), rel=1e-6, abs=1e-9
    )


def test_gspo_and_gspo_token_differ_only_where_advantages_do() -> None:
    random = np.random.default_rng(0)
    prev = -random.exponential(1.0, (2, 4))
    case = {
        "current": prev + 0.01,
        "prev": prev,
        "generation": prev,
        "reference": prev,
        "advantages": np.repeat([[1.0], [-0.5]], 4, 1),
        "mask": np.ones((2, 4)),
    }
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    plain = ObjectiveConfig(**(OBJECTIVES["gspo"] | wide))
    per_token = ObjectiveConfig(**(OBJECTIVES["gspo_token"] | wide))
    np.testing.assert_allclose(run(case, plain)[1].numpy(), run(case, per_token)[1].numpy(), rtol=1e-9)
    case["advantages"][0, 0] = -3.0  # a faulty message inside the sample
    assert not np.allclose(run(case, plain)[1].numpy(), run(case, per_token)[1].numpy())
