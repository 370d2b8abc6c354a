"""Metrics against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from omnifleet.config.recipe import ObjectiveConfig
from omnifleet_trainer.objectives.loss import policy_loss
from omnifleet_trainer.objectives.metrics import fold, lag_metrics, mean_of_updates, token_metrics
from omnifleet_trainer.objectives.tensors import Normalisers

CURRENT = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -1.5, -9.0]], dtype=torch.float64)
PREV = torch.tensor([[-1.1, -2.0, 5.0], [-0.5, -1.0, 5.0]], dtype=torch.float64)
GENERATION = torch.tensor([[-1.0, -2.3, 0.0], [-0.5, -1.2, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
LAG = torch.tensor([[0, 1, 0], [0, 0, 0]])
PAIRS = [
    (-1.0, -1.1, -1.0),
    (-2.0, -2.0, -2.3),
    (-1.5, -1.0, -1.2),
]  # (current, prev, generation) where mask is 1


def measured(rows: slice, whole: Normalisers) -> dict[str, float]:
    loss = policy_loss(
        current=CURRENT[rows],
        prev=PREV[rows],
        generation=GENERATION[rows],
        advantages=torch.ones_like(CURRENT[rows]),
        token_mask=MASK[rows],
        sample_mask=torch.ones(len(CURRENT[rows])).double(),
        normalisers=whole,
        objective=ObjectiveConfig(),
    )
    return token_metrics(
        current=CURRENT[rows],
        prev=PREV[rows],
        generation=GENERATION[rows],
        mask=MASK[rows],
        lag=LAG[rows],
        loss=loss,
        normalisers=whole,
    )


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


def test_values_by_hand() -> None:
    metrics = mean_of_updates([measured(slice(None), Normalisers(3.0, 2.0))])

    def mean(values: list[float]) -> float:
        return sum(values) / 3

    assert metrics["token_mult_prob_error"] == pytest.approx(
        mean([math.exp(abs(g - p)) for _, p, g in PAIRS])
    )
    assert metrics["gen_kl_error"] == pytest.approx(mean([k3(p - g) for _, p, g in PAIRS]))
    assert metrics["policy_kl_error"] == pytest.approx(mean([k3(g - p) for _, p, g in PAIRS]))
    assert metrics["sampling_importance_ratio"] == pytest.approx(mean([math.exp(p - g) for _, p, g in PAIRS]))
    assert metrics["approx_entropy"] == pytest.approx(mean([-math.exp(c - g) * c for c, _, g in PAIRS]))
    assert metrics["probs_ratio"] == pytest.approx(mean([math.exp(c - p) for c, p, _ in PAIRS]))
    assert metrics["probs_ratio_min"] == pytest.approx(math.exp(-0.5))
    assert metrics["probs_ratio_max"] == pytest.approx(math.exp(0.1))
    assert metrics["probs_ratio_clamped_min"] == pytest.approx(0.8)
    mixtures = [math.log((math.exp(p) + math.exp(g)) / 2) for _, p, g in PAIRS]
    js = [(k3(p - m) + k3(g - m)) / 2 for (_, p, g), m in zip(PAIRS, mixtures, strict=True)]
    assert metrics["js_divergence_error"] == pytest.approx(mean(js))
    weights = [math.exp(p - g) for _, p, g in PAIRS]
    assert metrics["ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 3)
    fresh = [math.exp(0.1), math.exp(0.2)]
    assert metrics["token_mult_prob_error_lag0"] == pytest.approx(sum(fresh) / 2)
    assert metrics["num_valid_samples"] == 2


def test_micro_batches_add_up_to_the_whole() -> None:
    whole = Normalisers(3.0, 2.0)
    split = fold([measured(slice(0, 1), whole), measured(slice(1, 2), whole)])
    assert split == pytest.approx(measured(slice(None), whole))


def test_updates_are_averaged_and_extremes_kept() -> None:
    step = mean_of_updates(
        [{"loss": 1.0, "probs_ratio_max": 2.0}, {"loss": 3.0, "probs_ratio_max": math.inf}]
    )
    assert step == {"loss": 2.0, "probs_ratio_max": 2.0}


def test_lag_histogram() -> None:
    assert lag_metrics([0, 0, 1, 3]) == {
        "lag_mean": 1.0,
        "lag_max": 3.0,
        "lag/0": 0.5,
        "lag/1": 0.25,
        "lag/3": 0.25,
    }
    assert lag_metrics([]) == {}
