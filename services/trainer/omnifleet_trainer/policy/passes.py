"""What is known of a step before its first update: masks, prev and reference logprobs, who is kept, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.batch.collate import MicroBatch, advantage_row
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.scored import scored
from omnifleet_trainer.objectives.assign import step_advantages
from omnifleet_trainer.objectives.corrections.errors import sequence_errors, within_error
from omnifleet_trainer.objectives.corrections.rejection import accepted
from omnifleet_trainer.objectives.kl import kl_of_reward
from omnifleet_trainer.objectives.masks import keep_whole, shifted
from omnifleet_trainer.objectives.tensors import masked
from omnifleet_trainer.policy.peers import ALONE, Peers

Forward = Callable[[MicroBatch], Tensor]
"""Micro-batch -> [B, S - first] logprobs of the tokens in columns first.. (temperature applied), with gradient."""
Loss = Callable[[int, Tensor], Tensor]
"""Place of a micro-batch among those that train, and its logprobs -> what its gradient is taken of."""


class Schedule(Protocol):
    """How a backend takes micro-batches through its model. Collective where the model is spread over ranks."""

    def look(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Logprobs of each (see `Forward`), without gradient; on every rank."""
        ...

    def learn(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Tensor]:
        """Forward and backward of each: gradients add up. Returns the logprobs, detached, on every rank.

        loss is asked once for each micro-batch, on the ranks that compute its logprobs.
        """
        ...


class OneByOne:
    """The schedule of a model that is whole here: one micro-batch after the other."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def look(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """See `Schedule`."""
        with torch.no_grad():
            return [self._forward(micro) for micro in micros]

    def learn(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Tensor]:
        """See `Schedule`."""
        found = []
        for i, micro in enumerate(micros):
            current = self._forward(micro)
            loss(i, current).backward()  # type: ignore[no-untyped-call]
            found.append(current.detach())
        return found


@dataclass(slots=True)
class Work:
    """A micro-batch and what earlier passes say about it. All [B, S - first] but keep, [B].

    errors, dropped: sequence errors of samples with trained tokens before any was dropped; rows that were dropped.
    """

    micro: MicroBatch
    keep: Tensor
    prev: Tensor | None = None
    reference: Tensor | None = None
    advantages: Tensor | None = None
    errors: list[float] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def columns(self, name: str) -> Tensor:
        """A per-token tensor of the micro-batch, for the predictions of columns first.. only."""
        values: Tensor = getattr(self.micro, name)
        return shifted(values)[:, self.micro.first - 1 :]

    def mask(self) -> Tensor:
        """1 for tokens that train."""
        return self.columns("token_mask") * self.keep[:, None]

    def known(self) -> Tensor:
        """prev, once a pass has given it."""
        assert self.prev is not None
        return self.prev

    def current_errors(self) -> list[float]:
        """mean exp|g - p| of each sample that has trained tokens now."""
        mask = self.mask()
        errors = sequence_errors(self.columns("generation_logprobs"), self.known(), mask)
        values: list[float] = errors[mask.sum(-1) > 0].tolist()
        return values


def opened(micro: MicroBatch, objective: ObjectiveConfig) -> Work:
    """A micro-batch of which nothing is known yet but its masks."""
    return Work(micro, micro.sample_mask * keep_whole(micro.truncated, objective.overlong_filtering))


def needs_prev_pass(objective: ObjectiveConfig, updates: int) -> bool:
    """False if the logprobs of the only update itself, detached, are all that is asked of `prev`."""
    return (
        updates > 1
        or objective.rejects_samples
        or objective.weight_normalisation
        or (objective.kl_in == "reward" and objective.kl_coefficient > 0)
    )


def look_before(work: Work, objective: ObjectiveConfig, prev: Tensor) -> None:
    """What the prev pass gave, and the samples that the objective's rules refuse by what it says."""
    work.prev = prev
    generation, mask = work.columns("generation_logprobs"), work.mask()
    work.errors = work.current_errors()
    if not objective.rejects_samples:
        return
    errors = sequence_errors(generation, work.known(), mask)
    kept = work.keep * within_error(errors, objective.sequence_error_threshold)
    kept = kept * accepted(work.known(), generation, mask, objective.rejection)
    gone = (work.keep > kept).tolist()
    work.dropped = [row for i, row in enumerate(work.micro.rows) if gone[i]]
    work.keep = kept


def reassigned(
    batch: StepBatch, works: Sequence[Work], objective: ObjectiveConfig, peers: Peers = ALONE
) -> list[float]:
    """Advantages of the step's samples: the loop's, or new ones if samples were dropped (by any rank) or the KL belongs
    to the reward."""
    penalised = objective.kl_in == "reward" and objective.kl_coefficient > 0
    own = [row for work in works for row in work.dropped]
    dropped = {row for rows in peers.gathered(own) for row in rows} if objective.rejects_samples else set()
    if not dropped and not penalised:
        return [sample.advantage for sample in batch.samples]
    kl = [0.0] * len(batch.samples)
    if penalised:
        for pairs in peers.gathered([pair for work in works for pair in _kl_of_samples(work, objective)]):
            for row, value in pairs:
                kl[row] = value
    samples = [
        scored(sample, valid=row not in dropped, kl=kl[row]) for row, sample in enumerate(batch.samples)
    ]
    advantages = step_advantages(samples, objective)
    for work in works:
        rows = torch.zeros_like(work.micro.advantages)
        for i, row in enumerate(work.micro.rows):
            values = advantage_row(batch.samples[row], advantages[row], objective.advantage_clip)
            rows[i, work.micro.prompt_lengths[i] : work.micro.lengths[i]] = torch.as_tensor(values)
        work.advantages = shifted(rows)[:, work.micro.first - 1 :]
    return advantages


def _kl_of_samples(work: Work, objective: ObjectiveConfig) -> list[tuple[int, float]]:
    assert work.reference is not None
    penalty = masked(kl_of_reward(work.known(), work.reference, objective), work.columns("token_mask"))
    sums = penalty.sum(-1).tolist()
    return [(row, sums[i]) for i, row in enumerate(work.micro.rows)]
