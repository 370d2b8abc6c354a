"""A mixture's experts on several ranks: each computes with those that it holds, for the tokens of all that share them.

    y = Σ_j g_j E_j(x),  j over the chosen experts; a rank adds the terms of those that it holds

For models of transformers, which stacks a layer's experts in tensors (E, ..) of one module. Tokens, gates and choices are
gathered from the ranks that share experts; what they found is added up, and each keeps the sums of its own tokens. Of these
two collectives each is the other's gradient. (2006.16668 sends tokens only where they go; AutoModel's own classes gather them,
too, where they have no kernels.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.policy.shards import own

GROUPS, EXPERTS = "ep_shard", "ep"
"""Axes of the mesh, as AutoModel's gradient norm knows them: ranks that hold the same experts, and those that share a layer's."""
_KNOWN = ("qwen3_vl_moe", "nemotron_h_omni")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_KNOB = "trainer.parallel.ep"


def check_expert_parallel(source: Path, size: int) -> None:
    """Refuse a checkpoint whose experts `size` ranks cannot share. Raises OmnifleetError(UNSUPPORTED, INVALID_CONFIG)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)  # published ones of Nemotron have other names in the file
    kind, text = config.model_type, config.get_text_config()
    experts = next((int(found) for name in _COUNTS if (found := getattr(text, name, None))), 0)
    if not experts or "moe" not in (getattr(text, "layers_block_type", None) or ["moe"]):
        raise OmnifleetError(
            Reason.UNSUPPORTED, f"this {kind} is no mixture of experts: set ep = 1", knob=_KNOB
        )
    if kind not in _KNOWN:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the automodel backend divides the experts of {', '.join(_KNOWN)}, not of {kind}: set ep = 1",
            knob=_KNOB,
        )
    if experts % size:
        raise invalid(
            f"ep = {size} does not divide the model's {experts} experts",
            knob=_KNOB,
            reason=Reason.INVALID_CONFIG,
        )


def experts_mesh(data: int, sharing: int) -> DeviceMesh:
    """`data` ranks in neighbourhoods of `sharing`, which hold a layer's experts between them; collective."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (data // sharing, sharing), mesh_dim_names=(GROUPS, EXPERTS))


def divide(experts: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Keep this rank's part of a layer's experts, and compute with it in `dtype` from now on.

    experts: a module of transformers that holds them all. mesh: the ranks that share them, on one axis.
    """
    for name, weight in list(experts.named_parameters(recurse=False)):
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)])
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
    plain: Any = copy.copy(experts)  # transformers' computation, without parameters or hooks of its own
    plain._parameters = {}
    plain.num_experts = plain.num_experts // mesh.size()
    experts.forward = partial(_forward, experts, plain, mesh, dtype)


def _forward(
    experts: nn.Module,
    plain: Any,
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    hidden: Tensor,
    chosen: Tensor,
    gates: Tensor,
) -> Tensor:
    """Tokens [N, H], their experts and gates [N, K] -> [N, H], as the module of transformers."""
    group, held = mesh.get_group(), plain.num_experts
    lengths = _lengths(hidden, group)
    hidden = _Gathered.apply(hidden, lengths, group)  # type: ignore[no-untyped-call]
    gates = _Gathered.apply(gates, lengths, group)  # type: ignore[no-untyped-call]
    chosen = _gathered(chosen, lengths, group) - mesh.get_local_rank() * held
    rows, places = torch.where((chosen >= 0) & (chosen < held))
    picked, shares = chosen[rows, places][:, None], gates[rows, places][:, None]
    if not len(rows):  # a gradient of 0 for every weight, not none
        rows = rows.new_zeros(1)
        picked, shares = rows[:, None], gates[:1, :1] * 0
    with _weights(experts, plain, dtype):
        found = plain.forward(hidden[rows], picked, shares)
    # As one rank adds them: in bfloat16 a GPU would round every sum.
    precise = torch.promote_types(found.dtype, torch.float32)
    terms = found.new_zeros(hidden.shape, dtype=precise).index_add(0, rows, found.to(precise))
    sums: Tensor = _Summed.apply(terms.to(found.dtype), lengths, group)  # type: ignore[no-untyped-call]
    return sums


@contextmanager
def _weights(experts: nn.Module, plain: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, `plain` has this rank's part of the weights; afterwards nothing keeps their copies in `dtype`."""
    parts = {name: own(weight).to(dtype) for name, weight in experts.named_parameters(recurse=False)}
    plain.__dict__.update(parts)
    try:
        yield
    finally:
        for name in parts:
            del plain.__dict__[name]


def _lengths(tokens: Tensor, group: Any) -> list[int]:
    """How many each rank of the group has."""
    parts = [
        torch.zeros(1, dtype=torch.int64, device=tokens.device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, torch.tensor([len(tokens)], device=tokens.device), group=group)
    return [int(part) for part in parts]


def _gathered(tokens: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
    """[n, ..] of each rank -> [N, ..] of all, one rank's after the other's."""
    padded = tokens.new_zeros((max(lengths), *tokens.shape[1:]))
    padded[: len(tokens)] = tokens
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _summed(terms: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
    """What each rank has for all tokens [N, ..] -> the sums over ranks for this rank's tokens [n, ..]."""
    total = terms.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    rank = dist.get_rank(group)
    return total[sum(lengths[:rank]) : sum(lengths[: rank + 1])].clone()


class _Gathered(torch.autograd.Function):
    """`_gathered`; backward: `_summed`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _gathered(tokens, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradient, ctx.lengths, ctx.group), None, None


class _Summed(torch.autograd.Function):
    """`_summed`; backward: `_gathered`."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _summed(terms, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.lengths, ctx.group), None, None
