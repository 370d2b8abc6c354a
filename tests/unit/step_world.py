"""A policy of pure torch, a bigram table, and batches for it: the step's order of things without a model library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnifleet.address import token_digest
from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.batch.collate import MicroBatch, collate
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.batch.scored import scored
from omnifleet_trainer.objectives.assign import step_advantages
from omnifleet_trainer.objectives.logprobs import token_logprobs
from omnifleet_trainer.policy.passes import OneByOne
from omnifleet_trainer.policy.step import response_logprobs, train_step

VOCABULARY = 11


class Bigrams:
    """Logits of the next token, by the token before it: [V, V] float64. `reference` is where it began."""

    def __init__(self, seed: int = 0, lr: float = 0.0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=random)
        self.reference = self.table.clone()
        self.table.requires_grad_()
        self.lr = lr
        self.gradients: list[Tensor] = []

    def forward(self, micro: MicroBatch, table: Tensor | None = None) -> Tensor:
        logits = (self.table if table is None else table)[micro.input_ids[:, micro.first - 1 : -1]]
        kept = None if micro.kept is None else micro.kept[:, micro.first :]
        return token_logprobs(logits, micro.input_ids[:, micro.first :], kept=kept)

    def update(self) -> float:
        assert self.table.grad is not None
        gradient = self.table.grad.clone()
        self.gradients.append(gradient)
        with torch.no_grad():
            self.table -= self.lr * gradient
        self.table.grad = None
        return float(gradient.norm())

    def reference_logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [self.forward(micro, self.reference) for micro in micros]

    def logprobs(self, batch: StepBatch) -> list[np.ndarray[Any, Any]]:
        return response_logprobs(cut(batch), len(batch.samples), OneByOne(self.forward))

    def train(
        self,
        batch: StepBatch,
        objective: ObjectiveConfig,
        *,
        tokens: int = 4096,
        updates: int = 1,
        **more: Any,
    ) -> dict[str, float]:
        """One step; the samples are cut evenly into `updates`, micro-batches hold at most `tokens`."""
        size = len(batch.samples) // updates
        parts = [
            cut(batch, range(i * size, (i + 1) * size), tokens, objective.advantage_clip)
            for i in range(updates)
        ]
        reference = self.reference_logprobs if objective.kl_coefficient else None
        return train_step(
            batch,
            parts,
            objective=objective,
            schedule=OneByOne(self.forward),
            update=self.update,
            reference=reference,
            **more,
        )


def cut(
    batch: StepBatch, rows: Sequence[int] | None = None, tokens: int = 4096, clip: float | None = None
) -> list[MicroBatch]:
    return collate(
        batch,
        range(len(batch.samples)) if rows is None else rows,
        micro_batch_tokens=tokens,
        contract=None,
        advantage_clip=clip,
    )


def sample(
    name: str, group: str, reward: float, reply: Sequence[int], prompt: Sequence[int] = (1, 2), **more: Any
) -> TrainingSample:
    settings: dict[str, Any] = {
        "generation_logprobs": [-1.0] * len(reply),
        "mask": [1] * len(reply),
        "lag": [0] * len(reply),
    }
    return TrainingSample(
        trajectory_id=name,
        group_id=group,
        prompt_token_ids=list(prompt),
        prompt_hash=token_digest(list(prompt)),
        token_ids=list(reply),
        reward=reward,
        **(settings | more),
    )


def batch_of(
    groups: int, size: int, objective: ObjectiveConfig, *, seed: int = 0, policy: Bigrams | None = None
) -> StepBatch:
    """Random replies of 1 to 6 tokens, rewards of 0 and 1 in each group; generation logprobs near the policy's."""
    random = np.random.default_rng(seed)
    samples = []
    for g in range(groups):
        for i in range(size):
            reply = random.integers(0, VOCABULARY, random.integers(1, 7)).tolist()
            samples.append(sample(f"{g}/{i}", f"g{g}", float(i % 2), reply, prompt=(g % VOCABULARY, 3)))
    batch = StepBatch(samples, 1)
    if policy is not None:
        for one, values in zip(samples, policy.logprobs(batch), strict=True):
            noise = random.normal(0, 0.05, len(values))
            one.generation_logprobs = np.minimum(values + noise, 0.0).tolist()
            one.lag = random.integers(0, 2, len(values)).tolist()
    assign(batch, objective)
    return batch


def assign(batch: StepBatch, objective: ObjectiveConfig) -> None:
    values = step_advantages([scored(one) for one in batch.samples], objective)
    for one, value in zip(batch.samples, values, strict=True):
        one.advantage = value
