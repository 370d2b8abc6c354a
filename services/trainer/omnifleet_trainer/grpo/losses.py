"""The clipped policy-gradient loss. Source: NeMo RL `ClippedPGLoss`, term by term; GSPO for sequence ratios.

Axes: B samples, T predictions. l = current, p = prev, g = generation logprobs of the same tokens; A = advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig

_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Trained tokens and samples of one whole optimiser update, over all micro-batches and ranks."""

    tokens: float
    sequences: float


@dataclass(frozen=True, slots=True)
class Loss:
    """value: scalar, with gradient; the sum over micro-batches is the loss of the update. The rest is for metrics.

    ratio, clipped_ratio, weights: [B, T]. kl, out_of_bounds: scalars, already divided by the normalisers.
    """

    value: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    weights: Tensor
    kl: Tensor
    out_of_bounds: Tensor


def clipped_loss(
    *,
    current: Tensor,
    prev: Tensor,
    generation: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    sample_mask: Tensor,
    normalisers: Normalisers,
    objective: ObjectiveConfig,
    reference: Tensor | None = None,
) -> Loss:
    """L = max(-A r, -A clip(r, 1 - low, 1 + high)); with dual clip c, min(L, -A c) where A < 0; times w; plus KL.

    current, prev, generation, reference: [B, T] logprobs, only current carries gradient. advantages: [B, T].
    token_mask: [B, T]; sample_mask: [B]. reference is needed when objective.kl_coefficient > 0 (else ValueError).
    """
    mask = token_mask * sample_mask[:, None]
    ratio = policy_ratio(current, prev, mask, objective.ratio)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    if objective.dual_clip is not None:
        bounded = torch.minimum(surrogate, -advantages * objective.dual_clip)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    weights, outside = importance_weights(prev, generation, mask, objective)
    if objective.importance_correction:
        surrogate = surrogate * weights
    value = reduce(surrogate, mask, normalisers, objective.reduction)
    kl = torch.zeros_like(value)
    if objective.kl_coefficient > 0:
        if reference is None:
            raise ValueError("objective.kl_coefficient > 0 needs logprobs of the reference policy")
        penalty = kl_penalty(current, reference, generation, objective)
        kl = reduce(penalty, mask, normalisers, objective.reduction)
        value = value + objective.kl_coefficient * kl
    share = (outside * mask).sum() / (normalisers.tokens + _TINY)
    return Loss(value, ratio.detach(), clipped.detach(), weights, kl.detach(), share)


def policy_ratio(current: Tensor, prev: Tensor, mask: Tensor, level: str) -> Tensor:
    """r = exp(l - p) per token, or exp(mean over the sample's trained tokens) for all of them (GSPO); [B, T]."""
    log_ratio = torch.where(mask > 0, current - prev, 0.0)
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, mask)[:, None].expand_as(log_ratio)
    return torch.exp(log_ratio)


def importance_weights(
    prev: Tensor, generation: Tensor, mask: Tensor, objective: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """w = exp(p - g), truncated as the objective says, and which of them were out of bounds; both [B, T].

    Token ratios: one weight a token. Sequence ratios: exp of the sum over the sample. NaN and infinities become 0.
    `tis` clamps to [min, max]; `icepop` zeroes tokens outside; `seq-mask-tis` zeroes samples whose exp(mean(p - g))
    is outside and keeps plain token weights in the others.
    """
    gap = torch.where(mask > 0, prev - generation, 0.0).detach()
    per_sequence = objective.ratio == "sequence" and objective.truncation != "seq-mask-tis"
    log_weight = gap.sum(-1, keepdim=True).expand_as(gap) if per_sequence else gap
    weights = torch.nan_to_num(torch.exp(log_weight), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = objective.truncation_min, objective.truncation_max
    outside = (weights < low) | (weights > high)
    match objective.truncation:
        case "none":
            return weights, torch.zeros_like(weights)
        case "tis":
            return weights.clamp(low, high), outside.to(weights.dtype)
        case "icepop":
            return torch.where(outside, 0.0, weights), outside.to(weights.dtype)
        case "seq-mask-tis":
            mean = torch.nan_to_num(torch.exp(masked_mean(gap, mask)), nan=0.0, posinf=0.0)[:, None]
            outside = ((mean < low) | (mean > high)).expand_as(weights)
            return torch.where(outside, 0.0, weights), outside.to(weights.dtype)


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """KL(l || ref) from x = ref - l of tokens drawn from l: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x.

    Source: Schulman, "Approximating KL divergence".
    """
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.exp(log_ratio) - 1 - log_ratio
    raise ValueError(f"KL estimator {kind!r} is not one of k1, k2, k3")


def kl_penalty(current: Tensor, reference: Tensor, generation: Tensor, objective: ObjectiveConfig) -> Tensor:
    """weight * k(ref - l), [B, T], clamped on both sides as in NeMo RL.

    weight = exp(l - stopgrad l): its value is 1, its gradient makes the estimate's gradient that of the KL. With
    kl_on_policy_approximation it is exp(l - g). Where the input clamp bites the weight carries no gradient.
    """
    log_ratio = reference - current
    anchor = generation if objective.kl_on_policy_approximation else current.detach()
    weight = torch.nan_to_num(torch.exp(current - anchor), nan=0.0, posinf=0.0, neginf=0.0)
    if objective.kl_input_clamp is not None:
        bound = objective.kl_input_clamp
        weight = torch.where(log_ratio.abs() > bound, weight.detach(), weight)
        log_ratio = log_ratio.clamp(-bound, bound)
    penalty = weight * kl_estimate(log_ratio, objective.kl_type)
    if objective.kl_output_clamp is not None:
        penalty = penalty.clamp(-objective.kl_output_clamp, objective.kl_output_clamp)
    return penalty


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the last axis where mask is 1; [B, T] -> [B]; 0 for an empty row."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def reduce(values: Tensor, mask: Tensor, normalisers: Normalisers, reduction: str) -> Tensor:
    """`token`: sum over trained tokens / all trained tokens. `sequence`: sum of samples' token means / samples.

    values, mask: [B, T]; a masked sample is a row of zeros. The normalisers are those of the whole update, so the
    result does not depend on how it is cut into micro-batches.
    """
    values = torch.where(mask > 0, values, 0.0)
    if reduction == "sequence":
        return masked_mean(values, mask).sum() / (normalisers.sequences + _TINY)
    return values.sum() / (normalisers.tokens + _TINY)
