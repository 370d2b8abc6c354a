"""One training step over any differentiable model: masks, passes, micro-batches, updates, metrics.

A backend brings three functions and nothing else; this file brings the order of things (NeMo RL's, section "step").
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.grpo.advantages import has_signal
from omnifleet_trainer.grpo.losses import Normalisers, clipped_loss
from omnifleet_trainer.grpo.masks import keep_whole, sequence_errors, shifted, within_error
from omnifleet_trainer.grpo.metrics import Metrics, fold, lag_metrics, mean_of_updates, token_metrics

Forward = Callable[[MicroBatch], Tensor]
"""Micro-batch -> [B, S - first] logprobs of the tokens in columns first.. (temperature applied), with gradient."""
Update = Callable[[], float]
"""Clip the gradients that are there and move the weights; returns the norm before clipping."""


@dataclass(slots=True)
class _Work:
    """A micro-batch and what earlier passes say about it. All [B, S - first] but keep, [B]."""

    micro: MicroBatch
    keep: Tensor
    prev: Tensor | None = None
    reference: Tensor | None = None
    errors: list[float] = field(default_factory=list)

    def columns(self, name: str) -> Tensor:
        """A per-token tensor of the micro-batch, for the predictions of columns first.. only."""
        values: Tensor = getattr(self.micro, name)
        return shifted(values)[:, self.micro.first - 1 :]

    def mask(self) -> Tensor:
        return self.columns("token_mask") * self.keep[:, None]


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


def train_step(
    batch: StepBatch,
    updates: Sequence[Sequence[MicroBatch]],
    *,
    objective: ObjectiveConfig,
    forward: Forward,
    update: Update,
    reference: Callable[[Sequence[MicroBatch]], list[Tensor]] | None = None,
) -> Metrics:
    """Train on `updates`, one optimiser update for each list of micro-batches (on the model's device).

    prev logprobs come from a pass before the first update. With a single update and no sequence-error mask that pass
    is left out: the logprobs of the update itself, detached, are the same numbers. An update without a trained token,
    or whose gradient is not finite, moves nothing and is counted in `skipped_updates`.
    """
    works = [[_Work(micro, _keep(micro, objective)) for micro in micros] for micros in updates]
    every = [work for part in works for work in part]
    if len(updates) > 1 or objective.sequence_error_threshold is not None:
        for work in every:
            with torch.no_grad():
                work.prev = forward(work.micro)
    masked = sum(_mask_errors(work, objective) for work in every)
    if reference is not None:
        for work, logprobs in zip(every, reference([work.micro for work in every]), strict=True):
            work.reference = logprobs
    parts, skipped = [], 0
    for part in works:
        metrics, moved = _one_update(part, objective, forward, update)
        parts.append(metrics)
        skipped += not moved
    totals = mean_of_updates(parts)
    totals |= {"updates": float(len(works) - skipped), "skipped_updates": float(skipped)}
    totals |= _sequence_error_metrics(every, masked)
    totals |= lag_metrics(_trained_lags(every))
    return totals | sample_metrics(batch)


def _keep(micro: MicroBatch, objective: ObjectiveConfig) -> Tensor:
    return micro.sample_mask * keep_whole(micro.truncated, objective.overlong_filtering)


def _mask_errors(work: _Work, objective: ObjectiveConfig) -> int:
    """Drop samples above the sequence-error threshold; returns how many."""
    if work.prev is None or objective.sequence_error_threshold is None:
        return 0
    errors = sequence_errors(work.columns("generation_logprobs"), work.prev, work.mask())
    kept = work.keep * within_error(errors, objective.sequence_error_threshold)
    dropped = int((work.keep - kept).sum())
    work.keep = kept
    return dropped


def _one_update(
    works: Sequence[_Work], objective: ObjectiveConfig, forward: Forward, update: Update
) -> tuple[Metrics, bool]:
    masks = [work.mask() for work in works]
    normalisers = Normalisers(
        tokens=float(sum(mask.sum() for mask in masks)),
        sequences=float(sum((mask.sum(-1) > 0).sum() for mask in masks)),
    )
    counts = {"global_valid_toks": normalisers.tokens, "global_valid_seqs": normalisers.sequences}
    if normalisers.tokens == 0:
        return counts | {"grad_norm": 0.0}, False
    parts = []
    for work, mask in zip(works, masks, strict=True):
        if mask.any():
            parts.append(_backward(work, mask, normalisers, objective, forward))
    norm = update()
    return fold(parts) | counts | {"grad_norm": norm if math.isfinite(norm) else 0.0}, math.isfinite(norm)


def _backward(
    work: _Work, mask: Tensor, normalisers: Normalisers, objective: ObjectiveConfig, forward: Forward
) -> Metrics:
    current = forward(work.micro)
    prev = current.detach() if work.prev is None else work.prev
    generation = work.columns("generation_logprobs")
    loss = clipped_loss(
        current=current,
        prev=prev,
        generation=generation,
        advantages=work.columns("advantages"),
        token_mask=work.columns("token_mask"),
        sample_mask=work.keep,
        normalisers=normalisers,
        objective=objective,
        reference=work.reference,
    )
    loss.value.backward()  # type: ignore[no-untyped-call]
    trained = mask.sum(-1) > 0
    work.errors = sequence_errors(generation, prev, mask)[trained].tolist()
    return token_metrics(
        current=current,
        prev=prev,
        generation=generation,
        mask=mask,
        lag=work.columns("lag"),
        loss=loss,
        normalisers=normalisers,
    )


def _sequence_error_metrics(works: Sequence[_Work], masked: int) -> Metrics:
    errors = [error for work in works for error in work.errors]
    if not errors:
        return {"num_masked_seqs_by_logprob_error": float(masked)}
    return {
        "num_masked_seqs_by_logprob_error": float(masked),
        "seq_mult_prob_error_max": max(errors),
        "seq_mult_prob_error_min": min(errors),
        "seq_mult_prob_error_mean": math.fsum(errors) / len(errors),
    }


def _trained_lags(works: Sequence[_Work]) -> list[int]:
    return [lag for work in works for lag in work.columns("lag")[work.mask() > 0].tolist()]


def sample_metrics(batch: StepBatch) -> Metrics:
    """Rewards, advantages, lengths and groups of a step. `zero_signal_groups`: groups that move nothing."""
    if not batch.samples:
        return {}
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in batch.samples:
        groups[sample.group_id].append(sample.advantage)
    advantages = [sample.advantage for sample in batch.samples]
    count = len(batch.samples)
    return {
        "reward": math.fsum(sample.reward for sample in batch.samples) / count,
        "advantages_mean": math.fsum(advantages) / count,
        "advantages_max": max(advantages),
        "advantages_min": min(advantages),
        "zero_signal_groups": float(sum(not has_signal(group) for group in groups.values())),
        "groups": float(len(groups)),
        "truncation_rate": sum(sample.truncated for sample in batch.samples) / count,
        "mean_prompt_length": sum(len(sample.prompt_token_ids) for sample in batch.samples) / count,
        "mean_response_length": sum(len(sample.token_ids) for sample in batch.samples) / count,
        "total_num_tokens": float(sum(sample.length for sample in batch.samples)),
    }
