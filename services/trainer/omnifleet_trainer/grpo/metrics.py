"""What a step says about itself. Source of names and formulas: NeMo RL `ClippedPGLoss` metrics.

Each function returns sums already divided by the update's normalisers, so that values of micro-batches add up; names
that end in _min or _max are folded by min and max instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from omnifleet_trainer.grpo.losses import Loss, Normalisers, kl_estimate

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
        "probs_ratio": loss.ratio[keep].double(),
        "probs_ratio_clamped": loss.clipped_ratio[keep].double(),
    }
    metrics = {name: values.sum().item() / max(normalisers.tokens, 1.0) for name, values in means.items()}
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
    metrics["is_oob_ratio"] = loss.out_of_bounds.item()
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
    """Metrics of the updates of one step -> of the step; also what only whole sums give.

    ess = (sum w)^2 / (n sum w^2), the share of tokens that the importance weights leave (Kish).
    token_mult_prob_error_lag0: TMPE over the tokens that the trained weights themselves sampled; what is above 1 there
    is the numerics of the two engines, and not the drift of the policy.
    """
    metrics = fold(updates)
    for name in metrics:
        if not name.endswith(("_min", "_max")) and name != "num_valid_samples":
            metrics[name] /= len(updates)
    square = metrics.pop("importance_square", 0.0)
    if square > 0:
        metrics["ess"] = metrics["sampling_importance_ratio"] ** 2 / square
    fresh, error = metrics.pop("fresh_tokens", 0.0), metrics.pop("fresh_error_sum", 0.0)
    if fresh > 0:
        metrics["token_mult_prob_error_lag0"] = error / fresh
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
