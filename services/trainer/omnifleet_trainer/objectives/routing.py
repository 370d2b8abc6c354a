"""Routing replay (R3): the trainer's mixture-of-experts layers use the experts that the engine chose.

    g_i = I_i e^{s_i} / Σ_j I_j e^{s_j}

I: the engine's choice, s: the trainer's router logits. The choice is constant, the gradient goes through s.
Source: 2510.11370. Routers that score each expert by itself have σ(s) for e^s, and a factor (2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def replayed_gates(logits: Tensor, choice: Tensor, *, normalised: bool = True) -> Tensor:
    """Router logits [N, E] and chosen experts [N, K] -> gates of the chosen, [N, K] float32, in their order.

    normalised: rows sum to 1 (the formula above); else each is its share among all experts.
    """
    if normalised:
        return torch.softmax(logits.gather(-1, choice).float(), dim=-1)
    return torch.softmax(logits.float(), dim=-1).gather(-1, choice)


def replayed_sigmoid_gates(
    logits: Tensor, choice: Tensor, *, normalised: bool = True, scale: float = 1.0
) -> Tensor:
    """The same where σ(s) stands for e^s; `scale` multiplies it in the end."""
    scores = torch.sigmoid(logits.float()).gather(-1, choice)
    return (scores / (scores.sum(-1, keepdim=True) + 1e-20) if normalised else scores) * scale


@contextmanager
def replaying(routers: Mapping[str, nn.Module], choices: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, each router gives the experts in `choices` (by the router's name, [N, K] ids) instead of its own; a row of -1
    leaves it its own.

    routers: modules whose forward returns (logits [N, E], gates [N, K], experts [N, K]) and whose `norm_topk_prob` says
    whether gates sum to 1 (before `routed_scaling_factor`): the top-k routers of transformers 5. One with an
    `e_score_correction_bias`, which takes part in the choice only, has sigmoid gates. Keep it open over the backward pass too where
    activations are recomputed, or open it again around what is. Raises ValueError for a choice without router or of another
    shape.
    """
    unknown = choices.keys() - routers.keys()
    if unknown:
        raise ValueError(f"no router is called {', '.join(sorted(unknown))}")
    hooks = [
        routers[name].register_forward_hook(partial(_replay, choice)) for name, choice in choices.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replay(choice: Tensor, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits, gates, experts = output
    if experts.shape != choice.shape:
        raise ValueError(
            f"the router chose experts of shape {tuple(experts.shape)}, replayed are {tuple(choice.shape)}"
        )
    chosen = torch.where(choice < 0, experts, choice.to(experts.dtype))
    normalised = bool(getattr(router, "norm_topk_prob", True))
    if hasattr(router, "e_score_correction_bias"):
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
        replayed = replayed_sigmoid_gates(logits, chosen, normalised=normalised, scale=scale)
    else:
        replayed = replayed_gates(logits, chosen, normalised=normalised)
    return logits, replayed.to(gates.dtype), chosen
