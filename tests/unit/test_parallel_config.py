"""How many ranks a recipe may ask for, and of which kind."""

from __future__ import annotations

import pytest

from omnifleet.config.recipe import TrainerConfig


def test_ranks_that_a_backend_does_not_have_are_refused_as_a_recipe() -> None:
    for sizes, words in (
        ({"tp": 2}, "shards over dp only"),
        ({"cp": 2}, "needs Transformer Engine"),
        ({"pp": 2}, "set pp = 1"),
        ({"ep": 2}, "does not divide dp 1"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainerConfig.model_validate({"parallel": sizes})
    with pytest.raises(ValueError, match="sequence parallelism"):
        TrainerConfig.model_validate({"backend": "megatron", "parallel": {"dp": 2, "tp": 2, "ep": 2}})
    assert TrainerConfig.model_validate({"parallel": {"dp": 4}}).parallel.world == 4
