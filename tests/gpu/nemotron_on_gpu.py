"""A tiny Nemotron's policy on a GPU, held against what transformers computes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import Job, open_rank
from tests.integration.family_world import close_to
from tests.integration.nemotron_world import TEMPERATURE


def three_steps(
    source: Path, backend: str, dtype: str, batch: StepBatch, expected: Sequence[Tensor]
) -> tuple[list[dict[str, Any]], dict[str, Tensor], set[str]]:
    """Logprobs as `expected` to 1e-3 of the largest (bfloat16 3e-2); then three steps.

    Returns their metrics, the weights before, and the names of those that moved.
    """
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2)
    trainer = TrainerConfig(backend=backend, optimizer=optimizer, micro_batch_tokens=300, dtype=dtype)
    policy = open_rank(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE), ALONE)
    try:
        found = policy.logprobs(batch)
        before = {name: tensor.cpu().clone() for name, tensor in policy.export()}
        steps = [policy.train(batch) for _ in range(3)]
        after = {name: tensor.cpu().clone() for name, tensor in policy.export()}
    finally:
        policy.close()
    worst = max(abs(torch.as_tensor(a).cpu() - b).max() for a, b in zip(found, expected, strict=True))
    shown = ", ".join(f"{step['loss']:.4g}/{step['grad_norm']:.4g}" for step in steps)
    print(f"\n{source.name} {backend} {dtype}: worst {worst:.2g} nats; loss/grad_norm {shown}")
    close_to(found, expected, rtol=3e-2 if dtype == "bfloat16" else 1e-3)
    return steps, before, {name for name in before if not torch.equal(before[name], after[name])}
