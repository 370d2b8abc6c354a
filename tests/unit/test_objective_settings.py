"""Each correction by configuration alone: a preset with one setting changed trains some steps, finite, towards what is right."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from omnifleet.config.load import load_recipe
from omnifleet_trainer.batch.samples import StepBatch
from tests.unit.step_world import Bigrams, batch_of

GRPO = Path(__file__).resolve().parents[2] / "recipes" / "objectives" / "grpo.yaml"
SETTINGS = {
    "tis": "truncation=tis",
    "tis-sequence": "{truncation: tis, weight_level: sequence}",
    "icepop": "truncation=icepop",
    "seq-mask-tis": "truncation=seq-mask-tis",
    "weight-normalisation": "weight_normalisation=true",
    "mis": "rejection=[{rule: sequence, min: 0.2, max: 5.0}]",
    "geometric": "rejection=[{rule: geometric, min: 0.8, max: 1.25}]",
    "k2": "rejection=[{rule: k2, max: 0.1}]",
    "k3": "rejection=[{rule: k3, max: 0.1}]",
    "veto": "rejection=[{rule: veto, min: 0.001, max: 1000.0}]",
    "sequence-error": "sequence_error_threshold=1.5",
    "dual-clip": "dual_clip=3.0",
    "advantage-clip": "advantage_clip=1.0",
    "kl-k1": "{kl_type: k1, kl_coefficient: 0.01}",
    "kl-k2": "{kl_type: k2, kl_coefficient: 0.01}",
    "kl-in-reward": "{kl_in: reward, kl_coefficient: 0.01}",
    "constant-reduction": "{reduction: constant, reduction_tokens: 8}",
}


def margin(policy: Bigrams, batch: StepBatch) -> float:
    """Mean logprob of right replies minus that of wrong ones'."""
    values = policy.logprobs(batch)
    means = [(float(np.mean(v)), s.reward) for v, s in zip(values, batch.samples, strict=True)]
    return float(np.mean([m for m, r in means if r == 1]) - np.mean([m for m, r in means if r == 0]))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_correction_trains_towards_the_right_replies(name: str) -> None:
    setting = SETTINGS[name]
    field, _, value = setting.partition("=")
    overrides = [f"objective.{field}={value}"]
    if setting.startswith("{"):
        pairs = [pair.split(": ") for pair in setting[1:-1].split(", ")]
        overrides = [f"objective.{key}={value}" for key, value in pairs]
    objective = load_recipe(str(GRPO), ["model.path=tiny", *overrides]).objective
    policy = Bigrams(lr=0.5)
    batch = batch_of(4, 4, objective, policy=policy)
    before = margin(policy, batch)
    for step in range(4):
        metrics = policy.train(batch, objective)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert step > 0 or metrics["grad_norm"] > 0
    assert margin(policy, batch) > before
