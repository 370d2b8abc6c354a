"""Megatron over ranks: tensor parallel, experts, stages, and data with the optimiser spread; the same numbers as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.folder import read_folder
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
        ("qwen2_5_vl", {"pp": 2}, {"packing": False}),
        ("mixture", {"pp": 2}, {"objective": {"kl_coefficient": 0.1}}),
        ("qwen2_5_vl", {"pp": 2, "tp": 2, "distributed_optimizer": True}, {"recompute": True}),
        ("qwen2_5_vl", {"dp": 2, "distributed_optimizer": True}, {"dtype": "bfloat16"}),
        ("tied", {"pp": 2}, {"dtype": "bfloat16"}),
        ("mixture", {"tp": 2, "sp": True, "ep": 2, "distributed_optimizer": True}, {"recompute": True}),
        ("qwen3_vl", {"cp": 2}, {"recompute": True}),
        ("qwen3_vl", {"tp": 2, "sp": True}, {"packing": False}),
        ("qwen2_5_vl", {"tp": 2}, {"logprob_chunk": 4}),
        ("qwen2_5_vl", {"tp": 2, "sp": True, "cp": 2}, {"logprob_chunk": 4}),
        ("tied", {"pp": 2}, {"logprob_chunk": 4}),
    ],
)
def test_ranks_train_as_one(
    model: str, parallel: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """And go on from a checkpoint of one, optimiser state included: it is by the checkpoint's names.

    bfloat16: to 3 %, as in the other backend.
    """
    rtol = 3e-2 if changes.get("dtype") == "bfloat16" else 1e-4
    source = tmp_path / "model"
    if model == "mixture":
        write_mixture(source)
        with_tower_heads(source, 2)
    else:
        family: Family = "qwen3_vl" if model == "qwen3_vl" else "qwen2_5_vl"
        write_checkpoint(source, family=family, tie_embeddings=model == "tied")
        if family == "qwen3_vl":
            with_tower_heads(source, 2)
    one = opened(source, backend="megatron", **changes)
    try:
        alone = history(one, source, tmp_path / "one")
    finally:
        one.close()
    world = opened(source, parallel, backend="megatron", **changes)
    assert isinstance(world, WorldPolicy)
    try:
        equal(history(world, source, tmp_path / "two"), alone, rtol=rtol)
        assert checkpoint_shapes(tmp_path / "two" / "policy") == checkpoint_shapes(source)
        world.load(tmp_path / "one")
        resumed = world.train(batch_for(source))
        for name in ("loss", "grad_norm", "lr"):
            assert resumed[name] == pytest.approx(alone.then[name], rel=rtol), name
    finally:
        world.close()
    one = opened(source, backend="megatron", **changes)
    try:
        one.load(tmp_path / "two")
        resumed = one.train(batch_for(source))
        for name in ("loss", "grad_norm", "lr"):
            assert resumed[name] == pytest.approx(alone.then[name], rel=rtol), name
    finally:
        one.close()


def with_tower_heads(source: Path, heads: int) -> None:
    """As many, each so much narrower: a tower that tensor-parallel ranks can divide."""
    body = json.loads((source / "config.json").read_text())
    body["vision_config"]["num_heads"] = heads
    (source / "config.json").write_text(json.dumps(body))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_weights_of_16_bits_follow_masters_of_32(family: Family, tmp_path: Path) -> None:
    """What is loaded is kept exactly, what engines get is rounded; loss and gradient norm within 3 % of float32's."""
    source = tmp_path / "model"
    write_checkpoint(source, family=family)
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = opened(source, backend="megatron", dtype=dtype)
        try:
            policy.save(tmp_path / dtype)
            start = dict(read_folder(tmp_path / dtype / "policy"))
            assert all(torch.equal(start[name], tensor) for name, tensor in read_folder(source))
            assert {str(tensor.dtype) for _, tensor in policy.export()} == {f"torch.{dtype}"}
            found[dtype] = history(policy, source, tmp_path / dtype)
        finally:
            policy.close()
    masters = dict(read_folder(tmp_path / "bfloat16" / "policy"))
    sent = found["bfloat16"].weights
    assert any(not torch.equal(masters[name], sent[name].float()) for name in masters)
    for name, tensor in found["float32"].weights.items():
        torch.testing.assert_close(masters[name], tensor, rtol=0, atol=5e-3)
    for ours, theirs in zip(found["bfloat16"].steps, found["float32"].steps, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=3e-2, abs=3e-3), name


def test_stages_that_the_model_does_not_fill_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family="qwen2_5_vl", layers=3)
    with pytest.raises(OmnifleetError, match="num_hidden_layers") as refused:
        opened(tmp_path, {"pp": 2}, backend="megatron")
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.parallel.pp"


def test_a_mixture_whose_ranks_would_repeat_tokens_is_refused(tmp_path: Path) -> None:
    write_mixture(tmp_path, hidden=128)
    with pytest.raises(OmnifleetError, match="set sp = true") as refused:
        opened(tmp_path, {"tp": 2}, backend="megatron")
    assert refused.value.knob == "trainer.parallel.sp"


@pytest.mark.soak
def test_ranks_that_do_not_divide_the_model_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=64, family="qwen2_5_vl")
    with pytest.raises(OmnifleetError, match="num_attention_heads") as refused:
        opened(tmp_path, {"tp": 2}, backend="megatron")
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.parallel.tp"
