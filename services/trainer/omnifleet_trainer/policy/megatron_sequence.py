"""A micro-batch divided along its tokens among ranks.

Context parallel, of packed ones: a rank holds every layer, and T / cp of the tokens. Only attention looks at the others': it
gathers keys and values, and sees what a mask of its own rows allows. To Megatron these ranks are ranks of data: weights, gradients
and optimiser state are spread over them as over those. Each embeds all media; the gradients of what it does not hold are 0.
Sequence parallel (2205.05198): ranks of a tensor-parallel group divide the tokens, of padded micro-batches the columns, between
their layers once more. Linear layers gather and scatter by themselves; norms are of each token alone, their gradients are added
up over the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnifleet.config.parallel import ParallelConfig
from omnifleet_trainer.policy.packing import Packing, parameters


class Division:
    """This rank's part of every micro-batch. Collective to make, on all ranks of the world."""

    def __init__(self, parallel: ParallelConfig, rank: int) -> None:
        self._parts, self._part = parallel.cp, rank // parallel.tp % parallel.cp
        self._between = parallel.sp
        self._tp, self._tp_rank = parallel.tp, rank % parallel.tp
        self.multiple = parallel.cp * (parallel.tp if parallel.sp else 1)
        """What the number of tokens of a pack, or of columns of a padded micro-batch, is made a multiple of."""
        self.group: Any = None
        """Of the ranks that share a sequence; None if this one has it whole."""
        for first in range(parallel.world if parallel.cp > 1 else 0):
            if first // parallel.tp % parallel.cp == 0:
                ranks = [first + part * parallel.tp for part in range(parallel.cp)]
                group = dist.new_group(ranks)
                self.group = group if rank in ranks else self.group

    @property
    def whole(self) -> bool:
        """Whether this rank attends to its packs alone."""
        return self.group is None

    def part(self, values: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of [.., T, ..]."""
        return values.tensor_split(self._parts, dim)[self._part]

    def between(self, hidden: Tensor) -> Tensor:
        """[T / cp, 1, H], or padded [S, B, H], as the first layer takes them."""
        if not self._between:
            return hidden
        from megatron.core import tensor_parallel

        scattered: Tensor = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
        return scattered

    def own(self, values: Tensor) -> Tensor:
        """[T, ..], or padded [S, ..], of what this rank has between its layers."""
        part = self.part(values, 0)
        return part.tensor_split(self._tp)[self._tp_rank] if self._between else part

    def features(self, marks: Tensor, layers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """marks [B, S] of the tokens that features stand for, B = 1 of a pack; features [features, H] of several layers, in the
        order of those: of the tokens that this rank has between layers."""
        if self._between:  # each rank of the group uses others of the same features
            from megatron.core import tensor_parallel

            layers = [tensor_parallel.copy_to_tensor_model_parallel_region(layer) for layer in layers]
        numbers = (marks.flatten().cumsum(0) - 1).view_as(marks)
        mine, which = (self.own(values.transpose(0, 1)).transpose(0, 1) for values in (marks, numbers))
        chosen = which[mine]
        return mine, [layer[chosen] for layer in layers]

    def mask(self, packing: Packing) -> Tensor | None:
        """[T / cp, T] bool: what each of this rank's tokens may look at. None if the pack is whole here."""
        if self.whole:
            return None
        tokens = torch.arange(packing.tokens, device=packing.bounds.device)
        rows = torch.bucketize(tokens, packing.bounds[1:], right=True)
        mine, own = self.part(tokens, 0), self.part(rows, 0)
        return (own[:, None] == rows) & (mine[:, None] >= tokens)

    def parameters(self, packing: Packing) -> Any:
        """What megatron-core's attention is told: of a part that it is one row, the mask says the rest."""
        if self.whole:
            return packing.parameters()
        size = packing.tokens // self._parts
        return parameters(packing.bounds.new_tensor([0, size]), size)

    def predictions(self, packing: Packing) -> tuple[Tensor, Tensor | slice]:
        """Places among this rank's tokens of what predicts wanted tokens, and which of the wanted ones: [N] bool, or all."""
        if self.whole:
            return packing.predictions, slice(None)
        size = packing.tokens // self._parts
        here = packing.predictions // size == self._part
        return packing.predictions[here] - self._part * size, here

    def joined(self, values: Tensor, here: Tensor | slice) -> Tensor:
        """[1, N] of all wanted tokens on every rank, from those `here`. The gradients of the ranks are averaged as those of
        ranks of data, so each is made as many times larger."""
        if isinstance(here, slice):
            return values
        full = values.new_zeros((1, len(here))).masked_scatter(here[None], values)
        joined: Tensor = _Joined.apply(full, self.group, self._parts)  # type: ignore[no-untyped-call]
        return joined


class _Joined(torch.autograd.Function):
    """The sum over a group; backward: what comes, times the group's size."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any, size: int) -> Tensor:
        ctx.size = size
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.size, None, None
