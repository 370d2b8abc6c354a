"""Layouts of a policy on two GPUs, each against one rank of the same backend and dtype: `python -m pytest -s -m gpu
tests/gpu/test_policy_layouts_gpu.py` prints a line for each. Nothing here needs Transformer Engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import open_rank
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.integration.family_world import batch_for
from tests.integration.rank_world import History, equal, history, job, opened, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BF16 = {"dtype": "bfloat16"}
_alone: dict[str, History] = {}


def written(folder: Path, model: str) -> Path:
    """A tiny model; the towers of Qwen3-VL get two heads, so that they can be divided."""
    if model == "mixture":
        write_mixture(folder)
    else:
        write_checkpoint(folder, family="qwen3_vl" if model == "qwen3_vl" else "qwen2_5_vl")
    if model != "qwen2_5_vl":
        body = json.loads((folder / "config.json").read_text())
        body["vision_config"]["num_heads"] = 2
        (folder / "config.json").write_text(json.dumps(body))
    return folder


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("backend", "model", "parallel", "changes"),
    [
        ("automodel", "qwen3_vl", {"dp": 2}, {}),
        ("automodel", "qwen3_vl", {"tp": 2}, {}),
        ("automodel", "qwen2_5_vl", {"tp": 2}, BF16),
        ("automodel", "mixture", {"dp": 2, "ep": 2}, {}),
        ("automodel", "mixture", {"dp": 2, "ep": 2}, BF16),
        ("megatron", "qwen3_vl", {"tp": 2}, {}),
        ("megatron", "qwen3_vl", {"tp": 2, "sp": True}, BF16),
        ("megatron", "mixture", {"tp": 2, "sp": True, "ep": 2}, {}),
        ("megatron", "mixture", {"tp": 2, "sp": True, "ep": 2, "distributed_optimizer": True}, BF16),
        ("megatron", "mixture", {"dp": 2, "ep": 2}, BF16),
        ("megatron", "qwen3_vl", {"pp": 2}, {}),
        ("megatron", "qwen2_5_vl", {"pp": 2}, BF16),
        ("megatron", "qwen3_vl", {"cp": 2}, {}),
        ("megatron", "mixture", {"cp": 2, "ep": 2, "distributed_optimizer": True}, BF16),
        ("megatron", "qwen2_5_vl", {"dp": 2, "distributed_optimizer": True}, BF16),
    ],
)
def test_two_gpus_train_as_one(
    backend: str, model: str, parallel: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """float32 to 1e-3, bfloat16 to 5e-2, over three steps and one after a checkpoint."""
    source = written(tmp_path / "model", model)
    key = f"{backend} {model} {changes}"
    if key not in _alone:
        policy = opened(source, backend=backend, **changes)
        try:
            _alone[key] = history(policy, source)
        finally:
            policy.close()
    policy = opened(source, parallel, backend=backend, **changes)
    try:
        found = history(policy, source, tmp_path / "saved")
        policy.load(tmp_path / "saved")
        resumed = policy.train(batch_for(source))
    finally:
        policy.close()
    rtol = 5e-2 if changes else 1e-3
    pairs = [
        f"{name} {ours[name]:.5g}/{theirs[name]:.5g}"
        for ours, theirs in zip(found.steps, _alone[key].steps, strict=True)
        for name in ("loss", "grad_norm")
    ]
    print(f"\nlayout {backend} {model} {parallel} {changes or 'float32'}: two/one {', '.join(pairs)}")
    equal(found, _alone[key], rtol=rtol)
    for name in ("loss", "grad_norm"):
        assert resumed[name] == pytest.approx(found.then[name], rel=rtol), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_policy_that_leaves_the_gpu_and_comes_back_trains_on(
    dtype: str, distributed: bool, tmp_path: Path
) -> None:
    """Two steps with a turn of the engines between them are two steps; and weights, gradients and moments are gone meanwhile.

    What else a tiny model's step leaves on the device, cuBLAS' workspaces, is more than all of these.
    """
    source = written(tmp_path / "model", "qwen2_5_vl")
    batch = batch_for(source)
    ends = []
    for turns in (False, True):
        sizes = {"distributed_optimizer": distributed}
        policy = open_rank(job(source, backend="megatron", dtype=dtype, parallel=sizes), ALONE)
        try:
            policy.train(batch)
            if turns:
                held, parameters = torch.cuda.memory_allocated(), sum(t.numel() for _, t in policy.export())
                policy.offload()
                assert held - torch.cuda.memory_allocated() >= 16 * parameters
                policy.onload()
            metrics = policy.train(batch)
            ends.append((metrics["loss"], metrics["grad_norm"], weights_of(policy)))
        finally:
            policy.close()
    print(f"\nturns {dtype} distributed={distributed}: {ends[0][:2]} stays, {ends[1][:2]} goes and comes")
    assert ends[0][1] > 0 and ends[1][:2] == pytest.approx(ends[0][:2], rel=1e-4)
    for name, tensor in ends[0][2].items():
        torch.testing.assert_close(ends[1][2][name].cpu(), tensor.cpu(), rtol=0, atol=1e-3)
