"""KL to a reference policy, estimated on the tokens that were sampled.

Source: Schulman, "Approximating KL divergence" (k1, k2, k3); NeMo RL for the weight and the two clamps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.tensors import exp_ratio


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """KL(l || ref) from x = ref - l of tokens drawn from l: k1 = -x, k2 = x² / 2, k3 = e^x - 1 - x.

    Raises ValueError for another kind.
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
    """KL of each token for the loss, [B, T]: weight · k(ref - l), clamped on both sides.

    weight = exp(l - stopgrad l): its value is 1, its gradient makes the estimate's gradient that of the KL. With
    kl_on_policy_approximation it is exp(l - g). Where the input clamp bites the weight carries no gradient.
    """
    log_ratio = reference - current
    anchor = generation if objective.kl_on_policy_approximation else current.detach()
    weight = exp_ratio(current - anchor)
    if objective.kl_input_clamp is not None:
        bound = objective.kl_input_clamp
        weight = torch.where(log_ratio.abs() > bound, weight.detach(), weight)
    return _clamped(weight, log_ratio, objective)


def kl_of_reward(prev: Tensor, reference: Tensor, objective: ObjectiveConfig) -> Tensor:
    """KL of each token for the reward, [B, T]: k(ref - prev), clamped on both sides; no gradient.

    Source: InstructGPT (2203.02155), REINFORCE++ (2501.03262): r' = r - β Σ_t k_t.
    """
    log_ratio = (reference - prev).detach()
    return _clamped(torch.ones_like(log_ratio), log_ratio, objective)


def _clamped(weight: Tensor, log_ratio: Tensor, objective: ObjectiveConfig) -> Tensor:
    if objective.kl_input_clamp is not None:
        log_ratio = log_ratio.clamp(-objective.kl_input_clamp, objective.kl_input_clamp)
    penalty = weight * kl_estimate(log_ratio, objective.kl_type)
    if objective.kl_output_clamp is not None:
        penalty = penalty.clamp(-objective.kl_output_clamp, objective.kl_output_clamp)
    return penalty
