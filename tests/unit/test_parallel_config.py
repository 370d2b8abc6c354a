"""How many ranks a recipe may ask for, and of which kind."""

from __future__ import annotations

import pytest

from omnifleet.config.parallel import ParallelConfig
from omnifleet.config.recipe import TrainerConfig

FIRST_COMPILE_S = 100
"""What the first step of a rank that compiles triton's and Mamba's kernels takes longer; see docs/policies.md."""


def test_ranks_that_a_backend_does_not_have_are_refused_as_a_recipe() -> None:
    for sizes, words in (
        ({"cp": 2}, "set cp = 1, or"),
        ({"dp": 2, "ep": 4}, "does not divide the dp x tp x cp = 2"),
        ({"tp": 2, "sp": True}, "set sp = False, or"),
        ({"pp": 2}, "set pp = 1, or"),
        ({"dp": 2, "tp": 2, "ep": 2}, "experts or layers, not both"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainerConfig.model_validate({"parallel": sizes})
    with pytest.raises(ValueError, match="sequence parallelism"):
        TrainerConfig.model_validate({"backend": "megatron", "parallel": {"dp": 2, "tp": 2, "ep": 2}})
    with pytest.raises(ValueError, match="packed sequences"):
        TrainerConfig.model_validate({"backend": "megatron", "packing": False, "parallel": {"cp": 2}})
    for name, value in (("lora", {"rank": 4}), ("logprob_chunk", 8)):
        with pytest.raises(ValueError, match="whole layers"):
            TrainerConfig.model_validate({name: value, "parallel": {"tp": 2}})
    for sizes in ({"dp": 4}, {"dp": 4, "ep": 2}):
        assert TrainerConfig.model_validate({"parallel": sizes}).parallel.world == 4


def test_neighbours_share_tensors_and_the_last_ranks_the_last_layers() -> None:
    sizes = {"dp": 2, "tp": 2, "pp": 2}
    parallel = TrainerConfig.model_validate({"backend": "megatron", "parallel": sizes}).parallel
    assert parallel.world == 8 and parallel.together == 2
    assert [parallel.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_wait_for_one_that_compiles_its_kernels_first() -> None:
    assert ParallelConfig().timeout_s >= 3 * FIRST_COMPILE_S
