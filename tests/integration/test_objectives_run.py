"""Every preset of recipes/objectives, by configuration alone, through the AutoModel policy on the tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from omnifleet.config.load import load_recipe
from omnifleet.config.recipe import Recipe
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.loop.batches import AdvantageRule
from omnifleet_trainer.policy.build import open_policy
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from tests.integration.text_batch import as_sampled, batch_of

pytestmark = pytest.mark.heavy

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "objectives"
PRESETS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
GROUPS, SIZE, STEPS = 3, 4, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


def recipe_of(preset: str, source: Path) -> Recipe:
    overrides = [
        f"model.path={source}",
        "model.freeze=[]",
        f"trainer.prompts_per_step={GROUPS}",
        f"trainer.generations_per_prompt={SIZE}",
        # gentler where replies that the policy has moved away from are rejected
        f"trainer.optimizer.lr={'5.0e-5' if preset == 'corrected' else '5.0e-4'}",
        "trainer.optimizer={eps: 1.0e-8, grad_clip: 1.0, warmup_steps: 0}",
        "trainer.threads=1",
    ]
    return load_recipe(str(RECIPES / f"{preset}.yaml"), overrides)


def margin(policy: Policy, batch: StepBatch) -> float:
    """Mean logprob of right replies' tokens minus that of wrong ones'."""
    values = policy.logprobs(batch)
    right = [v.mean() for v, s in zip(values, batch.samples, strict=True) if s.reward == 1]
    wrong = [v.mean() for v, s in zip(values, batch.samples, strict=True) if s.reward == 0]
    return float(np.mean(right) - np.mean(wrong))


def test_there_is_a_preset_for_each_objective() -> None:
    assert set(PRESETS) >= {
        *("grpo", "dr-grpo", "dapo", "gspo", "cispo", "decoupled-ppo", "aipo", "sapo", "topr", "dppo-tv"),
        *("reinforce-plus-plus", "rloo"),
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_towards_the_right_replies(preset: str, source: Path) -> None:
    recipe = recipe_of(preset, source)
    policy = open_policy(recipe, source)
    try:
        batch = as_sampled(batch_of(GROUPS, SIZE), policy, AdvantageRule(recipe.objective))
        before, kl = margin(policy, batch), []
        for step in range(STEPS):
            batch.step = step
            metrics = policy.train(batch)
            assert all(math.isfinite(value) for value in metrics.values()), metrics
            assert metrics["updates"] == 1.0 and metrics["grad_norm"] > 0
            kept = metrics["global_valid_seqs"]
            if step == 0 or not recipe.objective.rejects_samples:
                assert kept == GROUPS * SIZE
            assert kept + metrics["num_masked_seqs_by_logprob_error"] == GROUPS * SIZE
            kl.append(metrics["kl_penalty"])
            if step == 0:
                assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
                assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
        assert margin(policy, batch) > before + 1e-3
        penalised = recipe.objective.kl_coefficient > 0 and recipe.objective.kl_in == "loss"
        assert (kl[-1] > 0) == penalised
    finally:
        policy.close()
