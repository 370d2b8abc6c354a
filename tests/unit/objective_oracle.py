"""The objectives once more: numpy, float64, loops over samples and tokens, written from the papers' formulas.

Shares no code with the product. A case is a dict of arrays: current, prev, generation, reference [B, T]; advantages
[B, T]; mask [B, T] (token mask x sample mask).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Case = dict[str, Any]
Array = npt.NDArray[np.float64]


def loss_and_gradient(case: Case, c: Any) -> tuple[float, Array]:
    """Loss of the whole batch and its gradient by each current logprob."""
    mask = np.asarray(case["mask"], float)
    rows, width = mask.shape
    trained = [[t for t in range(width) if mask[b, t]] for b in range(rows)]
    tokens, sequences = sum(map(len, trained)), sum(1 for kept in trained if kept)
    weights = {b: token_weights(case, c, b, trained[b]) for b in range(rows)}
    scale = mean_weight(weights, trained, c) if c.weight_normalisation else 1.0
    value, gradient = 0.0, np.zeros((rows, width))
    for b in range(rows):
        for t in trained[b]:
            share = token_share(c, len(trained[b]), tokens, sequences)
            loss, slopes = surrogate(case, c, b, t, trained[b])
            w = weights[b][t] / scale if c.importance_correction else 1.0
            value += share * w * loss
            for u, slope in slopes.items():
                gradient[b, u] += share * w * slope
            if c.kl_coefficient and c.kl_in == "loss":
                k, slope = kl_term(case, c, b, t)
                value += share * c.kl_coefficient * k
                gradient[b, t] += share * c.kl_coefficient * slope
    return value, gradient


def token_share(c: Any, length: int, tokens: int, sequences: int) -> float:
    """What one token's loss counts in the batch's."""
    if c.reduction == "token":
        return 1 / tokens
    if c.reduction == "sequence":
        return 1 / length / sequences
    return 1 / (sequences * c.reduction_tokens)


def surrogate(case: Case, c: Any, b: int, t: int, trained: list[int]) -> tuple[float, dict[int, float]]:
    """Loss of one token, and its derivative by the logprob of each token of the sample."""
    now, g = case["current"][b], case["generation"][b]
    old = g if c.old_policy == "generation" else case["prev"][b]
    a = case["advantages"][b][t]
    r, rho = math.exp(now[t] - old[t]), math.exp(now[t] - g[t])
    match c.surrogate:
        case "clipped":
            return clipped(c, now, old, a, t, trained)
        case "cispo":
            w = min(max(r, 1 - c.clip_low), 1 + c.clip_high)
            return -w * a * now[t], {t: -w * a}
        case "aipo":
            w = min(rho, c.aipo.cap)
            return -w * a * now[t], {t: -w * a}
        case "sapo":
            tau = c.sapo.tau_positive if a > 0 else c.sapo.tau_negative
            s = 1 / (1 + math.exp(-tau * (r - 1)))
            return -4 / tau * s * a, {t: -4 * s * (1 - s) * r * a}
        case "topr":
            whole = math.exp(sum(now[u] - g[u] for u in trained))
            w = 1.0 if a >= 0 else min(whole, 1.0)
            return -w * a * now[t], {t: -w * a}
        case "dppo_tv":
            moved = math.exp(now[t]) - math.exp(g[t])
            dropped = moved > c.dppo.delta_high if a > 0 else moved < -c.dppo.delta_low
            w = 0.0 if dropped else min(rho, c.dppo.cap)
            return -w * a * now[t], {t: -w * a}
        case "reinforce":
            return -a * now[t], {t: -a}
    raise AssertionError(c.surrogate)


def clipped(
    c: Any, now: Array, old: Array, a: float, t: int, trained: list[int]
) -> tuple[float, dict[int, float]]:
    if c.ratio == "token":
        r, slope = math.exp(now[t] - old[t]), {t: 1.0}
    else:
        r = math.exp(sum(now[u] - old[u] for u in trained) / len(trained))
        slope = {t: 1.0} if c.ratio == "sequence_token" else {u: 1 / len(trained) for u in trained}
    bounded = min(max(r, 1 - c.clip_low), 1 + c.clip_high)
    plain, cut = -a * r, -a * bounded
    inside = 1 - c.clip_low <= r <= 1 + c.clip_high
    value, derivative = (plain, -a * r) if plain > cut or inside else (cut, 0.0)
    if c.dual_clip is not None and a < 0 and -a * c.dual_clip < value:
        value, derivative = -a * c.dual_clip, 0.0
    return value, {u: derivative * part for u, part in slope.items()}


def token_weights(case: Case, c: Any, b: int, trained: list[int]) -> dict[int, float]:
    gap = {t: case["prev"][b][t] - case["generation"][b][t] for t in trained}
    level = c.weight_level or ("token" if c.ratio == "token" else "sequence")
    if level == "sequence" and c.truncation != "seq-mask-tis":
        w = {t: math.exp(sum(gap.values())) for t in trained}
    else:
        w = {t: math.exp(gap[t]) for t in trained}
    low, high = c.truncation_min, c.truncation_max
    if c.truncation == "tis":
        return {t: min(max(v, low), high) for t, v in w.items()}
    if c.truncation == "icepop":
        return {t: v if low <= v <= high else 0.0 for t, v in w.items()}
    if c.truncation == "seq-mask-tis" and trained:
        mean = math.exp(sum(gap.values()) / len(trained))
        return w if low <= mean <= high else dict.fromkeys(trained, 0.0)
    return w


def mean_weight(weights: dict[int, dict[int, float]], trained: list[list[int]], c: Any) -> float:
    level = c.weight_level or ("token" if c.ratio == "token" else "sequence")
    if level == "sequence" and c.truncation != "seq-mask-tis":
        values = [weights[b][kept[0]] for b, kept in enumerate(trained) if kept]
    else:
        values = [weights[b][t] for b, kept in enumerate(trained) for t in kept]
    return sum(values) / len(values) if sum(values) > 0 else 1.0


def kl_term(case: Case, c: Any, b: int, t: int) -> tuple[float, float]:
    """Value, and the derivative: of the estimate, plus value x score (the weight exp(l - sg l) or exp(l - g))."""
    x = case["reference"][b][t] - case["current"][b][t]
    w = math.exp(case["current"][b][t] - case["generation"][b][t]) if c.kl_on_policy_approximation else 1.0
    k, dk = {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (math.exp(x) - 1 - x, 1 - math.exp(x)),
    }[c.kl_type]
    return w * k, w * (k + dk)


def passes(gap: list[float], rule: Any) -> bool:
    """Whether a sample with these prev - generation logprobs passes a rejection rule."""
    ratios = [math.exp(x) for x in gap]
    match rule.rule:
        case "sequence":
            return rule.min <= math.prod(ratios) <= rule.max
        case "geometric":
            return rule.min <= math.prod(ratios) ** (1 / len(ratios)) <= rule.max
        case "veto":
            return all(rule.min <= ratio <= rule.max for ratio in ratios)
        case "k2":
            return sum(math.log(ratio) ** 2 / 2 for ratio in ratios) / len(ratios) <= rule.max
        case "k3":
            return sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios) <= rule.max
    raise AssertionError(rule.rule)


def advantages(rewards: list[float], baseline: str, std: str) -> list[float]:
    """Advantages of one group in which all train; rewards differ."""
    values = np.asarray(rewards, float)
    out = []
    for i, reward in enumerate(values):
        others = np.delete(values, i)
        b = {"leave_one_out": others.mean(), "group_mean": values.mean(), "none": 0.0}[baseline]
        spread = {
            "leave_one_out": others.std(ddof=1) if len(others) > 1 and len(set(others)) > 1 else 0.0,
            "sample": values.std(ddof=1),
            "population": values.std(),
            "none": 0.0,
        }[std]
        out.append(float((reward - b) / (spread + 1e-6) if spread > 0 else reward - b))
    return out
