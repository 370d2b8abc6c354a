"""What a policy does over a few steps, on however many ranks, to be compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.policy.world import WorldPolicy
from tests.integration.family_world import TEMPERATURE, batch_for, close_to


def job(
    source: Path, *, freeze: tuple[str, ...] = (), objective: dict[str, Any] | None = None, **changes: Any
) -> Job:
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.01, warmup_steps=2)
    trainer = TrainerConfig(optimizer=optimizer, threads=1, micro_batch_tokens=150, **changes)
    return Job(source, trainer, ObjectiveConfig(**objective or {}), temperature=TEMPERATURE, freeze=freeze)


def opened(source: Path, parallel: dict[str, Any] | None = None, **changes: Any) -> Policy:
    """One rank here, or a world. A process is in one at a time."""
    if not parallel:
        return open_rank(job(source, **changes), ALONE)
    return WorldPolicy(job(source, parallel={"timeout_s": 120, **parallel}, **changes))


@dataclasses.dataclass(frozen=True)
class History:
    """Logprobs of a policy, its three steps, the weights that they end at, and the step after those."""

    logprobs: list[Any]
    steps: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    then: dict[str, float]


def history(policy: Policy, source: Path, folder: Path | None = None) -> History:
    """folder: what is saved after the three steps."""
    batch = batch_for(source)
    logprobs = policy.logprobs(batch)
    steps = [policy.train(batch) for _ in range(3)]
    if folder is not None:
        policy.save(folder)
    return History(logprobs, steps, weights_of(policy), policy.train(batch))


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(tensor).clone() for name, tensor in policy.export()}


def equal(ours: History, theirs: History, *, rtol: float = 1e-4) -> None:
    """Logprobs to 1e-5, loss and gradient norm to 4 digits, and the weights at the end."""
    close_to(ours.logprobs, theirs.logprobs, rtol=0.1 * rtol)
    for found, expected in zip([*ours.steps, ours.then], [*theirs.steps, theirs.then], strict=True):
        assert found.keys() == expected.keys()
        for name in ("loss", "grad_norm", "token_mult_prob_error", "logprob_gap_max", "kl_penalty"):
            assert found[name] == pytest.approx(expected[name], rel=rtol, abs=rtol / 10), name
        for name in ("lr", "updates", "global_valid_toks", "num_valid_samples", "media_references"):
            assert found[name] == expected[name], name
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=0, atol=rtol)
