"""Two ranks on two GPUs, over NCCL: the numbers of one. `python -m pytest tests/gpu/test_policy_ranks_gpu.py -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from tests.integration.rank_world import equal, history, opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    ("backend", "parallel", "changes", "rtol"),
    [
        ("automodel", {"dp": 2}, {}, 1e-3),
        ("automodel", {"dp": 2}, {"dtype": "bfloat16"}, 5e-2),
        ("megatron", {"tp": 2}, {}, 1e-3),
        ("megatron", {"pp": 2}, {}, 1e-3),
        ("megatron", {"dp": 2, "distributed_optimizer": True}, {}, 1e-3),
    ],
)
def test_two_gpus_train_as_one(
    backend: str, parallel: dict[str, Any], changes: dict[str, Any], rtol: float, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family="qwen2_5_vl")
    histories = []
    for sizes in (None, parallel):
        policy = opened(tmp_path, sizes, backend=backend, **changes)
        try:
            histories.append(history(policy, tmp_path))
        finally:
            policy.close()
    equal(histories[1], histories[0], rtol=rtol)
