"""What the AutoModel recipes of Nemotron Omni may be asked for here, and their twins."""

from __future__ import annotations

import pytest

from omnifleet.config import load_recipe


@pytest.mark.parametrize("name", ["clevr-automodel", "mmpr-automodel"])
@pytest.mark.parametrize("sharing", [1, 8])
def test_eight_ranks_may_share_experts_or_spread_them_by_fsdp_alone(name: str, sharing: int) -> None:
    recipe = load_recipe(
        f"nemotron-omni/{name}", [f"trainer.parallel={{ep: {sharing}, dp: 8}}", "cluster.nodes=1"]
    )
    parallel = recipe.trainer.parallel
    assert recipe.trainer.backend == "automodel" and (parallel.world, parallel.ep) == (8, sharing)


@pytest.mark.parametrize("name", ["clevr-automodel", "mmpr-automodel"])
def test_the_automodel_twins_are_of_the_model_s_own_family(name: str) -> None:
    large, small = (load_recipe(f"{kind}/{name}", plan=True) for kind in ("nemotron-omni", "twins"))
    assert small.model.family == "nemotron_omni" and small.sampling.bad_words == large.sampling.bad_words
    assert set(small.model.freeze) == set(large.model.freeze) - {"sound_encoder.*"}
    assert small.rollout.engine.arguments["mamba_ssm_cache_dtype"] == "float32"
