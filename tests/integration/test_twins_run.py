"""The twins of the reference's recipes, by configuration alone: two steps each through their backend on one CPU rank, or on two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from omnifleet.config.load import load_recipe
from omnifleet_trainer.loop.batches import AdvantageRule
from omnifleet_trainer.policy.build import open_policy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.hybrid import write_hybrid
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.integration.text_batch import as_sampled, batch_of
from tests.unit.test_twins import TWINS

pytestmark = [pytest.mark.heavy, pytest.mark.soak]
OF_TWO_RANKS = ("dense-tp2", "moe-ep2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By backend: the model's own family, and one that Megatron has; and a mixture, by the twin that trains it."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("automodel", "megatron", "moe-ep2")}
    write_hybrid(made["automodel"])
    write_checkpoint(made["megatron"], family="qwen2_5_vl")
    write_mixture(made["moe-ep2"])
    return made


@pytest.mark.parametrize("name", [*TWINS, *OF_TWO_RANKS])
def test_a_twin_trains_two_steps(name: str, folders: dict[str, Path]) -> None:
    source = folders.get(name) or folders[load_recipe(f"twins/{name}").trainer.backend]
    recipe = load_recipe(f"twins/{name}", [f"model.path={source}", "trainer.threads=1"])
    trainer, objective = recipe.trainer, recipe.objective
    policy = open_policy(recipe, source)
    try:
        assert policy.describe()["ranks"] == ("2" if name in OF_TWO_RANKS else "1")
        frozen = [pattern.removesuffix("*") for pattern in recipe.model.freeze]
        assert frozen and not any(weight.startswith(tuple(frozen)) for weight in policy.trainable_names())
        batch = batch_of(trainer.prompts_per_step, trainer.generations_per_prompt, last_is_cut=True)
        as_sampled(batch, policy, AdvantageRule(objective))
        whole = len(batch.samples)
        cut = trainer.prompts_per_step if objective.overlong_filtering else 0
        for step in range(2):
            batch.step = step
            metrics = policy.train(batch)
            assert all(math.isfinite(value) for value in metrics.values()), metrics
            updates = whole / (trainer.batch_samples or whole)
            assert metrics["updates"] == updates and metrics["grad_norm"] > 0
            assert metrics["global_valid_seqs"] == (whole - cut) / updates, "of one update"
            share = trainer.optimizer.warmup_start if trainer.optimizer.warmup_steps else 1.0
            if step == 0:
                assert metrics["lr"] == pytest.approx(share * trainer.optimizer.lr)
                assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
    finally:
        policy.close()
