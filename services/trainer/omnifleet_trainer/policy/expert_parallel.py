"""Experts of a mixture on several ranks: each holds some, and computes with them for the tokens of all that share a layer's.

    y = Σ_j g_j E_j(x),  j over the chosen experts; a rank adds the terms of those that it holds

For models of transformers, which stacks a layer's experts in tensors (E, ..) of one module. Tokens, gates and choices are
gathered from the ranks that share experts; what they found is added up, and each keeps its own tokens. Of these two
collectives each is the other's gradient. (2006.16668 sends tokens only where they go; a gather is what AutoModel's own classes
do without kernels, too.)
"""

from __future__ import annotations

import copy
import json
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
from omnifleet_trainer.policy.shards import own as local

GROUPS, EXPERTS = "ep_shard", "ep"
"""Axes of the mesh, as AutoModel's gradient norm knows them: ranks that hold the same experts, and those that share a layer's."""
_KNOWN = ("qwen3_vl_moe", "nemotron_h_omni")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_KNOB = "trainer.parallel.ep"


def check_expert_parallel(source: Path, size: int) -> None:
    """Whether `size` ranks can share the experts of the checkpoint's model. Raises OmnifleetError(UNSUPPORTED, INVALID_CONFIG)."""
    body: dict[str, Any] = json.loads((source / "config.json").read_text())
    kind, text = body.get("model_type"), body.get("text_config") or body
    experts = next((int(text[name]) for name in _COUNTS if text.get(name)), 0)
    if not experts or "moe" not in text.get("layers_block_type", ["moe"]):
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
    """Of `data` ranks, neighbours that are `sharing` experts; collective."""
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
    group, count = mesh.get_group(), plain.num_experts
    counts = _lengths(hidden, group)
    hidden = _Gathered.apply(hidden, counts, group)  # type: ignore[no-untyped-call]
    gates = _Gathered.apply(gates, counts, group)  # type: ignore[no-untyped-call]
    chosen = _gathered(chosen, counts, group) - mesh.get_local_rank() * count
    rows, places = torch.where((chosen >= 0) & (chosen < count))
    picked, shares = chosen[rows, places][:, None], gates[rows, places][:, None]
    if not len(rows):  # a gradient of 0 for every weight, not none
        rows = rows.new_zeros(1)
        picked, shares = rows[:, None], gates[:1, :1] * 0
    with _weights(experts, plain, dtype):
        found = plain.forward(hidden[rows], picked, shares)
    total = found.new_zeros(hidden.shape).index_add(0, rows, found)
    own: Tensor = _Own.apply(total, counts, group)  # type: ignore[no-untyped-call]
    return own


@contextmanager
def _weights(experts: nn.Module, plain: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, `plain` has this rank's part of them; afterwards nothing keeps what they were in `dtype`."""
    parts = {name: local(weight).to(dtype) for name, weight in experts.named_parameters(recurse=False)}
    plain.__dict__.update(parts)
    try:
        yield
    finally:
        for name in parts:
            del plain.__dict__[name]


def _lengths(own: Tensor, group: Any) -> list[int]:
    """Of each rank's."""
    parts = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor([len(own)], device=own.device), group=group)
    return [int(part) for part in parts]


def _gathered(own: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
    """[N, ..] of every rank, one after the other."""
    padded = own.new_zeros((max(lengths), *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _own(every: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
    """The sum over ranks of what they have for this rank's tokens."""
    total = every.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    rank = dist.get_rank(group)
    return total[sum(lengths[:rank]) : sum(lengths[: rank + 1])].clone()


class _Gathered(torch.autograd.Function):
    """`_gathered`; backward: `_own`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _gathered(own, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own(gradient, ctx.lengths, ctx.group), None, None


class _Own(torch.autograd.Function):
    """`_own`; backward: `_gathered`."""

    @staticmethod
    def forward(ctx: Any, every: Tensor, lengths: Sequence[int], group: Any) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _own(every, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.lengths, ctx.group), None, None
