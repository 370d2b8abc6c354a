"""The loss of a micro-batch: surrogate × correction, plus KL, reduced.

    loss = reduce(w · L(l, old, g, A)) + β · reduce(KL(l, ref))

Axes: B samples, T predictions. l = current, p = prev, g = generation logprobs of the same tokens; A = advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.corrections.weights import Weights, importance_weights
from omnifleet_trainer.objectives.kl import kl_penalty
from omnifleet_trainer.objectives.reductions import reduce
from omnifleet_trainer.objectives.surrogates import SURROGATES
from omnifleet_trainer.objectives.surrogates.port import Surrogate
from omnifleet_trainer.objectives.tensors import Normalisers, Tokens, masked


@dataclass(frozen=True, slots=True)
class Loss:
    """value: scalar, with gradient; the sum over micro-batches is the loss of the update. The rest is for metrics.

    kl: scalar, already divided by the normalisers, before its coefficient.
    """

    value: Tensor
    kl: Tensor
    surrogate: Surrogate
    weights: Weights


def policy_loss(
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
    """The loss that `objective` describes.

    current, prev, generation, reference: [B, T] logprobs, only current carries gradient. advantages, token_mask:
    [B, T]; sample_mask: [B]. What stands where a mask is 0 changes nothing. Raises ValueError if a KL in the loss
    has no reference.
    """
    mask = token_mask * sample_mask[:, None]
    old = generation if objective.old_policy == "generation" else prev
    tokens = Tokens.clean(current=current, old=old, generation=generation, advantages=advantages, mask=mask)
    surrogate = SURROGATES[objective.surrogate](tokens, objective)
    weights = importance_weights(prev, generation, mask, objective)
    per_token = surrogate.loss
    if objective.importance_correction:
        per_token = per_token * (weights.values / normalisers.weight)
    value = reduce(per_token, mask, normalisers, objective.reduction, objective.reduction_tokens)
    kl = torch.zeros_like(value)
    if objective.kl_coefficient > 0 and objective.kl_in == "loss":
        if reference is None:
            raise ValueError("objective.kl_coefficient > 0 needs logprobs of the reference policy")
        penalty = kl_penalty(tokens.current, masked(reference, mask), tokens.generation, objective)
        kl = reduce(penalty, mask, normalisers, objective.reduction, objective.reduction_tokens)
        value = value + objective.kl_coefficient * kl
    return Loss(value, kl.detach(), surrogate, weights)
