"""What the AutoModel recipes of Nemotron Omni may be asked for here, and what is still refused."""

from __future__ import annotations

import pytest

from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError

SPREAD = ("trainer.parallel={ep: 1, dp: 8}", "cluster.nodes=1")


@pytest.mark.parametrize("name", ["clevr-automodel", "mmpr-automodel"])
def test_experts_spread_by_fsdp_alone_are_taken(name: str) -> None:
    recipe = load_recipe(f"nemotron-omni/{name}", [*SPREAD])
    assert recipe.trainer.backend == "automodel" and recipe.trainer.parallel.world == 8


@pytest.mark.parametrize("name", ["clevr-automodel", "mmpr-automodel"])
def test_expert_parallelism_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(OmnifleetError, match="set ep = 1"):
        load_recipe(f"nemotron-omni/{name}", ["cluster.nodes=1"])


@pytest.mark.parametrize("name", ["clevr-automodel", "mmpr-automodel"])
def test_the_automodel_twins_are_of_the_model_s_own_family(name: str) -> None:
    large, small = (load_recipe(f"{kind}/{name}", plan=True) for kind in ("nemotron-omni", "twins"))
    assert small.model.family == "nemotron_omni" and small.sampling.bad_words == large.sampling.bad_words
    assert set(small.model.freeze) == set(large.model.freeze) - {"sound_encoder.*"}
    assert small.rollout.engine.arguments["mamba_ssm_cache_dtype"] == "float32"
