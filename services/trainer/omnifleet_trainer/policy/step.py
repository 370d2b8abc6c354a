"""One training step over any differentiable model: masks, passes, micro-batches, updates, metrics.

A backend brings three functions and nothing else; this file brings the order of things (NeMo RL's, section "step").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.batch.collate import MicroBatch, advantage_row
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.scored import scored
from omnifleet_trainer.objectives.assign import step_advantages
from omnifleet_trainer.objectives.corrections.errors import sequence_errors, within_error
from omnifleet_trainer.objectives.corrections.rejection import accepted
from omnifleet_trainer.objectives.corrections.weights import importance_weights, weight_sums
from omnifleet_trainer.objectives.kl import kl_of_reward
from omnifleet_trainer.objectives.loss import policy_loss
from omnifleet_trainer.objectives.masks import keep_whole, shifted
from omnifleet_trainer.objectives.metrics import (
    Metrics,
    fold,
    gap_metrics,
    lag_metrics,
    mean_of_updates,
    sequence_error_metrics,
    token_metrics,
)
from omnifleet_trainer.objectives.tensors import Normalisers, masked
from omnifleet_trainer.policy.mismatch import Mismatch, OnMismatch, report_worst

Forward = Callable[[MicroBatch], Tensor]
"""Micro-batch -> [B, S - first] logprobs of the tokens in columns first.. (temperature applied), with gradient."""
Update = Callable[[], float]
"""Clip the gradients that are there and move the weights; returns the norm before clipping."""
Total = Callable[[Sequence[float]], Sequence[float]]
"""Counts of this rank -> counts of all ranks."""


@dataclass(slots=True)
class _Work:
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
        return self.columns("token_mask") * self.keep[:, None]

    def known(self) -> Tensor:
        assert self.prev is not None
        return self.prev


def response_logprobs(
    micros: Sequence[MicroBatch], samples: int, forward: Forward
) -> list[npt.NDArray[np.float32]]:
    """Logprobs of each sample's response tokens, in the order of the step."""
    replies: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * samples
    for micro in micros:
        with torch.no_grad():
            values = forward(micro).float().cpu().numpy()
        for i, row in enumerate(micro.rows):
            start, end = micro.prompt_lengths[i] - micro.first, micro.lengths[i] - micro.first
            replies[row] = values[i, start:end]
    return replies


def needs_prev_pass(objective: ObjectiveConfig, updates: int) -> bool:
    """False if the logprobs of the only update itself, detached, are all that is asked of `prev`."""
    return (
        updates > 1
        or objective.rejects_samples
        or objective.weight_normalisation
        or (objective.kl_in == "reward" and objective.kl_coefficient > 0)
    )


def train_step(
    batch: StepBatch,
    updates: Sequence[Sequence[MicroBatch]],
    *,
    objective: ObjectiveConfig,
    forward: Forward,
    update: Update,
    reference: Callable[[Sequence[MicroBatch]], list[Tensor]] | None = None,
    total: Total = list,
    on_mismatch: OnMismatch | None = None,
) -> Metrics:
    """Train on `updates`, one optimiser update for each list of micro-batches (on the model's device).

    prev logprobs come from a pass before the first update, which is left out where `needs_prev_pass` says so. A sample
    that is dropped by what that pass says leaves the baseline of its group too. An update without a trained token, or
    whose gradient is not finite, moves nothing and is counted in `skipped_updates`.
    total: sums counts over ranks. on_mismatch: told of the sample on which the two engines differ most, if they do.
    """
    works = [[_Work(micro, _keep(micro, objective)) for micro in micros] for micros in updates]
    every = [work for part in works for work in part]
    if needs_prev_pass(objective, len(updates)):
        for work in every:
            with torch.no_grad():
                work.prev = forward(work.micro)
            _reject(work, objective)
    if reference is not None:
        for work, logprobs in zip(every, reference([work.micro for work in every]), strict=True):
            work.reference = logprobs
    advantages = _reassigned(batch, every, objective)
    parts, skipped = [], 0
    for part in works:
        metrics, moved = _one_update(part, objective, forward, update, total)
        parts.append(metrics)
        skipped += not moved
    totals = mean_of_updates(parts)
    totals |= {"updates": float(len(works) - skipped), "skipped_updates": float(skipped)}
    totals |= _step_metrics(batch, every, advantages)
    if on_mismatch is not None:
        report_worst(batch, _mismatches(every), totals.get("token_mult_prob_error", 1.0), on_mismatch)
    return totals


def _keep(micro: MicroBatch, objective: ObjectiveConfig) -> Tensor:
    return micro.sample_mask * keep_whole(micro.truncated, objective.overlong_filtering)


def _reject(work: _Work, objective: ObjectiveConfig) -> None:
    """Drop samples that the objective's rules refuse, by the prev pass."""
    generation, mask = work.columns("generation_logprobs"), work.mask()
    work.errors = _errors(work, mask)
    if not objective.rejects_samples:
        return
    errors = sequence_errors(generation, work.known(), mask)
    kept = work.keep * within_error(errors, objective.sequence_error_threshold)
    kept = kept * accepted(work.known(), generation, mask, objective.rejection)
    work.dropped = [
        row for row, gone in zip(work.micro.rows, (work.keep > kept).tolist(), strict=True) if gone
    ]
    work.keep = kept


def _errors(work: _Work, mask: Tensor) -> list[float]:
    errors = sequence_errors(work.columns("generation_logprobs"), work.known(), mask)
    values: list[float] = errors[mask.sum(-1) > 0].tolist()
    return values


def _reassigned(batch: StepBatch, works: Sequence[_Work], objective: ObjectiveConfig) -> list[float]:
    """Advantages of the step's samples: the loop's, or new ones if samples were dropped or the KL belongs to the reward."""
    penalised = objective.kl_in == "reward" and objective.kl_coefficient > 0
    dropped = {row for work in works for row in work.dropped}
    if not dropped and not penalised:
        return [sample.advantage for sample in batch.samples]
    kl = [0.0] * len(batch.samples)
    if penalised:
        for work in works:
            assert work.reference is not None
            penalty = masked(
                kl_of_reward(work.known(), work.reference, objective), work.columns("token_mask")
            )
            for row, value in zip(work.micro.rows, penalty.sum(-1).tolist(), strict=True):
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


def _one_update(
    works: Sequence[_Work], objective: ObjectiveConfig, forward: Forward, update: Update, total: Total
) -> tuple[Metrics, bool]:
    masks = [work.mask() for work in works]
    normalisers = _normalisers(works, masks, objective, total)
    counts = {"global_valid_toks": normalisers.tokens, "global_valid_seqs": normalisers.sequences}
    if normalisers.tokens == 0:
        return counts | {"grad_norm": 0.0}, False
    parts = []
    for work, mask in zip(works, masks, strict=True):
        if mask.any():
            parts.append(_backward(work, mask, normalisers, objective, forward))
    norm = update()
    return fold(parts) | counts | {"grad_norm": norm if math.isfinite(norm) else 0.0}, math.isfinite(norm)


def _normalisers(
    works: Sequence[_Work], masks: Sequence[Tensor], objective: ObjectiveConfig, total: Total
) -> Normalisers:
    """Counts of the whole update, over all ranks, before any of it is trained."""
    tokens = float(sum(mask.sum() for mask in masks))
    sequences = float(sum((mask.sum(-1) > 0).sum() for mask in masks))
    weights, weighed = 0.0, 0.0
    if objective.weight_normalisation:
        for work, mask in zip(works, masks, strict=True):
            values = importance_weights(
                work.known(), work.columns("generation_logprobs"), mask, objective
            ).values
            part, count = weight_sums(values, mask, objective)
            weights, weighed = weights + part, weighed + count
    tokens, sequences, weights, weighed = total([tokens, sequences, weights, weighed])
    return Normalisers(tokens, sequences, weights / weighed if weights > 0 else 1.0)


def _backward(
    work: _Work, mask: Tensor, normalisers: Normalisers, objective: ObjectiveConfig, forward: Forward
) -> Metrics:
    current = forward(work.micro)
    if work.prev is None:
        work.prev = current.detach()
        work.errors = _errors(work, mask)
    generation = work.columns("generation_logprobs")
    loss = policy_loss(
        current=current,
        prev=work.prev,
        generation=generation,
        advantages=work.columns("advantages") if work.advantages is None else work.advantages,
        token_mask=work.columns("token_mask"),
        sample_mask=work.keep,
        normalisers=normalisers,
        objective=objective,
        reference=work.reference,
    )
    loss.value.backward()  # type: ignore[no-untyped-call]
    return token_metrics(
        current=current,
        prev=work.prev,
        generation=generation,
        mask=mask,
        lag=work.columns("lag"),
        loss=loss,
        normalisers=normalisers,
    )


def _step_metrics(batch: StepBatch, works: Sequence[_Work], advantages: Sequence[float]) -> Metrics:
    """What only the whole step knows. masked_token_share, masked_sample_share: of the replies, what did not train."""
    seen = [(work, work.mask()) for work in works if work.prev is not None]
    after = [error for work, mask in seen for error in _errors(work, mask)]
    before = [error for work in works for error in work.errors]
    rewards = [batch.samples[row].reward for work in works for row in work.dropped]
    gaps = [(work.known() - work.columns("generation_logprobs")).abs()[mask > 0] for work, mask in seen]
    lags = [lag for work in works for lag in work.columns("lag")[work.mask() > 0].tolist()]
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    trained = sum(int((work.mask().sum(-1) > 0).sum()) for work in works)
    metrics = sequence_error_metrics(before, after, rewards) | lag_metrics(lags)
    if gaps:
        metrics |= gap_metrics(torch.cat(gaps).float().cpu().numpy())
    if tokens:
        metrics["masked_token_share"] = 1 - len(lags) / tokens
        metrics["masked_sample_share"] = 1 - trained / len(batch.samples)
        metrics["advantages/mean"] = math.fsum(advantages) / len(advantages)
        metrics["advantages/max"], metrics["advantages/min"] = max(advantages), min(advantages)
    return metrics


def _mismatches(works: Sequence[_Work]) -> list[Mismatch]:
    """The worst sample of each micro-batch."""
    found = []
    for work in works:
        mask = work.mask()
        if work.prev is None or not mask.any():
            continue
        generation = work.columns("generation_logprobs")
        errors = sequence_errors(generation, work.prev, mask)
        i = int(errors.argmax())
        kept = mask[i] > 0
        found.append(
            Mismatch(
                row=work.micro.rows[i],
                error=float(errors[i]),
                generation=generation[i][kept].double().exp().cpu().numpy(),
                policy=work.prev[i][kept].double().exp().cpu().numpy(),
            )
        )
    return found
