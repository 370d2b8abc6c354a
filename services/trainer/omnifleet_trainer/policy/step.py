"""One training step over any differentiable model: masks, passes, micro-batches, updates, metrics.

A backend brings three functions and nothing else; this file brings the order of things (NeMo RL's, section "step").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.objectives.corrections.errors import sequence_errors
from omnifleet_trainer.objectives.corrections.weights import importance_weights, weight_sums
from omnifleet_trainer.objectives.loss import Loss, policy_loss
from omnifleet_trainer.objectives.metrics import (
    Metrics,
    fold,
    gap_metrics,
    lag_metrics,
    mean_of_updates,
    sequence_error_metrics,
    token_metrics,
)
from omnifleet_trainer.objectives.tensors import Normalisers
from omnifleet_trainer.policy.mismatch import THRESHOLD, Mismatch, OnMismatch, report_worst
from omnifleet_trainer.policy.passes import Schedule, Work, look_before, needs_prev_pass, opened, reassigned
from omnifleet_trainer.policy.peers import ALONE, Peers

Update = Callable[[], float]
"""Clip the gradients that are there and move the weights; returns the norm before clipping."""


def response_logprobs(
    micros: Sequence[MicroBatch], samples: int, schedule: Schedule
) -> list[npt.NDArray[np.float32]]:
    """Logprobs of each sample's response tokens, in the order of the step."""
    replies: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * samples
    for micro, logprobs in zip(micros, schedule.look(micros), strict=True):
        values = logprobs.float().cpu().numpy()
        for i, row in enumerate(micro.rows):
            start, end = micro.prompt_lengths[i] - micro.first, micro.lengths[i] - micro.first
            replies[row] = values[i, start:end]
    return replies


def train_step(
    batch: StepBatch,
    updates: Sequence[Sequence[MicroBatch]],
    *,
    objective: ObjectiveConfig,
    schedule: Schedule,
    update: Update,
    reference: Callable[[Sequence[MicroBatch]], list[Tensor]] | None = None,
    peers: Peers = ALONE,
    on_mismatch: OnMismatch | None = None,
) -> Metrics:
    """Train on `updates`, one optimiser update for each list of micro-batches (on the model's device).

    prev logprobs come from a pass before the first update, which is left out where `needs_prev_pass` says so. A sample
    that is dropped by what that pass says leaves the baseline of its group too. An update without a trained token, or
    whose gradient is not finite, moves nothing and is counted in `skipped_updates`.
    peers: ranks that train other samples of the step, with as many micro-batches in each update; the backend averages
    their gradients. Metrics are those of all. on_mismatch: told of the sample on which the two engines differ most, if they do.
    """
    works = [[opened(micro, objective) for micro in micros] for micros in updates]
    every = [work for part in works for work in part]
    if needs_prev_pass(objective, len(updates)):
        found = schedule.look([work.micro for work in every])
        for work, logprobs in zip(every, found, strict=True):
            look_before(work, objective, logprobs)
    if reference is not None:
        for work, logprobs in zip(every, reference([work.micro for work in every]), strict=True):
            work.reference = logprobs
    advantages = reassigned(batch, every, objective, peers)
    parts, skipped = [], 0
    for part in works:
        metrics, moved = _one_update(part, objective, schedule, update, peers)
        parts.append(metrics)
        skipped += not moved
    totals = mean_of_updates(parts)
    totals |= {"updates": float(len(works) - skipped), "skipped_updates": float(skipped)}
    totals |= _step_metrics(batch, every, advantages, peers)
    error = totals.get("token_mult_prob_error", 1.0)
    if on_mismatch is not None and error > THRESHOLD:
        worst = [one for part in peers.gathered(_mismatches(every)) for one in part]
        report_worst(batch, [Mismatch.of(one) for one in worst], error, on_mismatch)
    return totals


def _one_update(
    works: Sequence[Work], objective: ObjectiveConfig, schedule: Schedule, update: Update, peers: Peers
) -> tuple[Metrics, bool]:
    masks = [work.mask() for work in works]
    normalisers = _normalisers(works, masks, objective, peers)
    counts = {"global_valid_toks": normalisers.tokens, "global_valid_seqs": normalisers.sequences}
    if normalisers.tokens == 0:
        return counts | {"grad_norm": 0.0}, False
    training = [pair for pair in zip(works, masks, strict=True) if peers.any(bool(pair[1].any()))]

    def loss(i: int, current: Tensor) -> Tensor:
        """Gradients of all peers are averaged afterwards: they must add up to as many times the gradient."""
        return _loss(training[i][0], current, normalisers, objective).value * peers.size

    found = schedule.learn([work.micro for work, _ in training], loss)
    parts = [
        _metrics(work, mask, current, normalisers, objective)
        for (work, mask), current in zip(training, found, strict=True)
    ]
    norm = update()
    return fold(peers.gathered(fold(parts))) | counts | {
        "grad_norm": norm if math.isfinite(norm) else 0.0
    }, math.isfinite(norm)


def _normalisers(
    works: Sequence[Work], masks: Sequence[Tensor], objective: ObjectiveConfig, peers: Peers
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
    tokens, sequences, weights, weighed = peers.total([tokens, sequences, weights, weighed])
    return Normalisers(tokens, sequences, weights / weighed if weights > 0 else 1.0)


def _loss(work: Work, current: Tensor, normalisers: Normalisers, objective: ObjectiveConfig) -> Loss:
    if work.prev is None:
        work.prev = current.detach()
        work.errors = work.current_errors()
    return policy_loss(
        current=current,
        prev=work.prev,
        generation=work.columns("generation_logprobs"),
        advantages=work.columns("advantages") if work.advantages is None else work.advantages,
        token_mask=work.columns("token_mask"),
        sample_mask=work.keep,
        normalisers=normalisers,
        objective=objective,
        reference=work.reference,
    )


def _metrics(
    work: Work, mask: Tensor, current: Tensor, normalisers: Normalisers, objective: ObjectiveConfig
) -> Metrics:
    """Of logprobs without gradient, so that ranks which did not compute them have the metrics too."""
    loss = _loss(work, current, normalisers, objective)
    return token_metrics(
        current=current,
        prev=work.known(),
        generation=work.columns("generation_logprobs"),
        mask=mask,
        lag=work.columns("lag"),
        loss=loss,
        normalisers=normalisers,
    )


def _step_metrics(
    batch: StepBatch, works: Sequence[Work], advantages: Sequence[float], peers: Peers
) -> Metrics:
    """What only the whole step knows. masked_token_share, masked_sample_share: of the replies, what did not train."""
    seen = [(work, work.mask()) for work in works if work.prev is not None]
    after = [error for work, _ in seen for error in work.current_errors()]
    before = [error for work in works for error in work.errors]
    rewards = [batch.samples[row].reward for work in works for row in work.dropped]
    parts = peers.gathered([before, after, rewards])
    before, after, rewards = ([value for part in parts for value in part[i]] for i in range(3))
    gaps = [(work.known() - work.columns("generation_logprobs")).abs()[mask > 0] for work, mask in seen]
    gap = peers.joined(torch.cat(gaps).float().cpu().numpy() if gaps else np.zeros(0, np.float32))
    lags = [work.columns("lag")[work.mask() > 0].float().cpu().numpy() for work in works]
    lag = peers.joined(np.concatenate(lags) if lags else np.zeros(0, np.float32)).astype(int).tolist()
    (trained,) = peers.total([sum(int((work.mask().sum(-1) > 0).sum()) for work in works)])
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    metrics = sequence_error_metrics(before, after, rewards) | lag_metrics(lag) | gap_metrics(gap)
    if tokens:
        metrics["masked_token_share"] = 1 - len(lag) / tokens
        metrics["masked_sample_share"] = 1 - trained / len(batch.samples)
        metrics["advantages/mean"] = math.fsum(advantages) / len(advantages)
        metrics["advantages/max"], metrics["advantages/min"] = max(advantages), min(advantages)
    return metrics


def _mismatches(works: Sequence[Work]) -> list[dict[str, Any]]:
    """The worst sample of each micro-batch, as JSON; see `Mismatch`."""
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
            {
                "row": work.micro.rows[i],
                "error": float(errors[i]),
                "generation": generation[i][kept].double().exp().tolist(),
                "policy": work.prev[i][kept].double().exp().tolist(),
            }
        )
    return found
