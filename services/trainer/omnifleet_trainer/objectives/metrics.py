"""What a step says about itself. Source of names and formulas: NeMo RL `ClippedPGLoss` metrics; ESS is Kish's.

Functions of micro-batches return sums already divided by the update's normalisers, so that values add up; names that
end in _min or _max are folded by min and max instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet_trainer.objectives.kl import kl_estimate
from omnifleet_trainer.objectives.loss import Loss
from omnifleet_trainer.objectives.tensors import Normalisers

Metrics = dict[str, float]


@torch.no_grad()
def token_metrics(
    *,
    current: Tensor,
    prev: Tensor,
    generation: Tensor,
    mask: Tensor,
    lag: Tensor,
    loss: Loss,
    normalisers: Normalisers,
) -> Metrics:
    """Metrics of one micro-batch; logprobs, mask (token mask x sample mask) and lag in steps are [B, T].

    token_mult_prob_error (TMPE) = mean exp|g - p|, 1 is perfect. gen_kl_error, policy_kl_error: k3 of p - g and of
    g - p. js_divergence_error: half k3 to the mixture from both sides. approx_entropy = -mean exp(l - g) l.
    clipped_low_share, clipped_high_share: tokens that the surrogate's bound took hold of. is_oob_ratio: tokens whose
    weight was truncated; weight_low_share, weight_high_share: on which side.
    """
    keep = mask > 0
    now, p, g = current[keep].double(), prev[keep].double(), generation[keep].double()
    mixture = torch.logaddexp(p, g) - math.log(2)
    js = (kl_estimate(p - mixture, "k3") + kl_estimate(g - mixture, "k3")) / 2
    weights = torch.nan_to_num(torch.exp(p - g), nan=0.0, posinf=0.0)
    means = {
        "token_mult_prob_error": torch.exp((g - p).abs()),
        "gen_kl_error": kl_estimate(p - g, "k3"),
        "policy_kl_error": kl_estimate(g - p, "k3"),
        "js_divergence_error": js,
        "sampling_importance_ratio": weights,
        "importance_square": weights.square(),
        "approx_entropy": -torch.exp(now - g) * now,
        "probs_ratio": loss.surrogate.ratio[keep].double(),
        "probs_ratio_clamped": loss.surrogate.bounded[keep].double(),
        "clipped_low_share": loss.surrogate.low[keep].double(),
        "clipped_high_share": loss.surrogate.high[keep].double(),
        "weight_low_share": loss.weights.low[keep].double(),
        "weight_high_share": loss.weights.high[keep].double(),
    }
    metrics = {name: values.sum().item() / max(normalisers.tokens, 1.0) for name, values in means.items()}
    metrics["is_oob_ratio"] = metrics["weight_low_share"] + metrics["weight_high_share"]
    for name in ("probs_ratio", "probs_ratio_clamped"):
        if keep.any():
            metrics[f"{name}_min"] = means[name].min().item()
            metrics[f"{name}_max"] = means[name].max().item()
    fresh = lag[keep] == 0
    metrics["fresh_error_sum"] = means["token_mult_prob_error"][fresh].sum().item()
    metrics["fresh_tokens"] = float(fresh.sum())
    metrics["num_valid_samples"] = float((mask.sum(-1) > 0).sum())
    metrics["loss"] = loss.value.item()
    metrics["kl_penalty"] = loss.kl.item()
    return metrics


def fold(parts: Iterable[Mapping[str, float]]) -> Metrics:
    """Metrics of micro-batches -> of their update: sums, minima and maxima; infinities are left out of the latter."""
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith(("_min", "_max")):
                if math.isfinite(value):
                    pick = min if name.endswith("_min") else max
                    total[name] = pick(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """Metrics of the updates of one step -> of the step: means over the updates that have them, and what only whole
    sums give.

    ess = (sum w)^2 / (n sum w^2), the share of tokens that the importance weights leave (Kish).
    token_mult_prob_error_lag0: TMPE over the tokens that the trained weights themselves sampled; what is above 1 there
    is the numerics of the two engines, and not the drift of the policy.
    """
    metrics = fold(updates)
    counts = Counter(name for update in updates for name in update)
    for name in metrics:
        if not name.endswith(("_min", "_max")) and name != "num_valid_samples":
            metrics[name] /= counts[name]
    square = metrics.pop("importance_square", 0.0)
    if square > 0:
        metrics["ess"] = metrics["sampling_importance_ratio"] ** 2 / square
    fresh, error = metrics.pop("fresh_tokens", 0.0), metrics.pop("fresh_error_sum", 0.0)
    if fresh > 0:
        metrics["token_mult_prob_error_lag0"] = error / fresh
    return metrics


def gap_metrics(gaps: npt.NDArray[np.float32]) -> Metrics:
    """|prev - generation| of all trained tokens of a step -> logprob_gap_p50, _p99, _max; nothing for no tokens."""
    if not gaps.size:
        return {}
    p50, p99 = np.quantile(gaps.astype(np.float64), [0.5, 0.99])
    return {
        "logprob_gap_p50": float(p50),
        "logprob_gap_p99": float(p99),
        "logprob_gap_max": float(gaps.max()),
    }


def sequence_error_metrics(
    before: Sequence[float], after: Sequence[float], masked_rewards: Sequence[float]
) -> Metrics:
    """max_, mean_, min_seq_mult_prob_error over all samples with trained tokens, the same `_after_mask` over those
    that stayed; num_masked_seqs_by_logprob_error; masked_correct_pct: share of masked ones whose reward is 1.
    """
    metrics = {"num_masked_seqs_by_logprob_error": float(len(masked_rewards))}
    for errors, suffix in ((before, ""), (after, "_after_mask")):
        if errors:
            metrics[f"max_seq_mult_prob_error{suffix}"] = max(errors)
            metrics[f"mean_seq_mult_prob_error{suffix}"] = math.fsum(errors) / len(errors)
            metrics[f"min_seq_mult_prob_error{suffix}"] = min(errors)
    if masked_rewards:
        correct = sum(reward == 1 for reward in masked_rewards)
        metrics["masked_correct_pct"] = correct / len(masked_rewards)
    return metrics


def lag_metrics(lags: Iterable[int]) -> Metrics:
    """Lags of trained tokens, in steps -> lag_mean, lag_max and `lag/K`: share of tokens that lag K steps."""
    counts = Counter(lags)
    total = counts.total()
    if not total:
        return {}
    shares = {f"lag/{lag}": count / total for lag, count in sorted(counts.items())}
    mean = sum(lag * count for lag, count in counts.items()) / total
    return {"lag_mean": mean, "lag_max": float(max(counts)), **shares}
