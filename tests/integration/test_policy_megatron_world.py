"""Megatron over ranks: tensor parallel, experts, stages, and data with the optimiser spread; the same numbers as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.world import WorldPolicy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.families import Family
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.integration.family_world import batch_for
from tests.integration.rank_world import equal, history, opened

pytestmark = [pytest.mark.heavy, pytest.mark.soak]


@pytest.mark.parametrize(
    ("model", "parallel", "changes"),
    [
        ("qwen2_5_vl", {"tp": 2}, {}),
        pytest.param("qwen2_5_vl", {"dp": 2, "distributed_optimizer": True}, {}, marks=pytest.mark.soak),
        pytest.param("mixture", {"dp": 2, "ep": 2}, {}, marks=pytest.mark.soak),
        pytest.param(
            "mixture", {"dp": 2, "ep": 2, "distributed_optimizer": True}, {}, marks=pytest.mark.soak
        ),
        pytest.param("qwen2_5_vl", {"tp": 2}, {"packing": False}, marks=pytest.mark.soak),
        ("tied", {"pp": 2}, {"packing": False}),
        ("qwen3_vl", {"pp": 2}, {"freeze": ("model.visual.*",)}),
        ("mixture", {"pp": 2}, {"objective": {"kl_coefficient": 0.1}}),
        ("qwen2_5_vl", {"pp": 2, "tp": 2, "distributed_optimizer": True}, {"recompute": True}),
    ],
)
def test_ranks_train_as_one(
    model: str, parallel: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """And go on from a checkpoint of one, optimiser state included: it is by the checkpoint's names."""
    source = tmp_path / "model"
    if model == "mixture":
        write_mixture(source)
    else:
        family: Family = "qwen3_vl" if model == "qwen3_vl" else "qwen2_5_vl"
        write_checkpoint(source, family=family, tie_embeddings=model == "tied")
    one = opened(source, backend="megatron", **changes)
    try:
        alone = history(one, source, tmp_path / "one")
    finally:
        one.close()
    world = opened(source, parallel, backend="megatron", **changes)
    assert isinstance(world, WorldPolicy)
    try:
        equal(history(world, source, tmp_path / "two"), alone)
        assert checkpoint_shapes(tmp_path / "two" / "policy") == checkpoint_shapes(source)
        world.load(tmp_path / "one")
        resumed = world.train(batch_for(source))
        for name in ("loss", "grad_norm", "lr"):
            assert resumed[name] == pytest.approx(alone.then[name], rel=1e-4), name
    finally:
        world.close()
    one = opened(source, backend="megatron", **changes)
    try:
        one.load(tmp_path / "two")
        resumed = one.train(batch_for(source))
        for name in ("loss", "grad_norm", "lr"):
            assert resumed[name] == pytest.approx(alone.then[name], rel=1e-4), name
    finally:
        one.close()


def test_stages_that_the_model_does_not_fill_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family="qwen2_5_vl", layers=3)
    with pytest.raises(OmnifleetError, match="num_hidden_layers") as refused:
        opened(tmp_path, {"pp": 2}, backend="megatron")
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.parallel.pp"


@pytest.mark.soak
def test_ranks_that_do_not_divide_the_model_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=64, family="qwen2_5_vl")
    with pytest.raises(OmnifleetError, match="num_attention_heads") as refused:
        opened(tmp_path, {"tp": 2}, backend="megatron")
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.parallel.tp"
