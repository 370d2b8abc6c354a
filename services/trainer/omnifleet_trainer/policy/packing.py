"""Rows of a micro-batch one after the other, without the padding between them: [B, S] -> [1, T]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omnifleet_trainer.batch.collate import MicroBatch


class Packing:
    """The places of one micro-batch's tokens. T: tokens that are no padding, and as many after them as make it a multiple
    of `multiple`, a row of nothing; N: those in columns first.. of it."""

    def __init__(self, micro: MicroBatch, multiple: int = 1) -> None:
        device = micro.input_ids.device
        lengths = torch.tensor(micro.lengths, device=device)
        columns = torch.arange(micro.input_ids.shape[1], device=device)
        self._real = columns < lengths[:, None]
        self._wanted = self._real[:, micro.first :]
        self._spare = -sum(micro.lengths) % multiple
        self.tokens = sum(micro.lengths) + self._spare
        """T"""
        if self._spare:
            lengths = torch.cat([lengths, lengths.new_tensor([self._spare])])
        ends = lengths.cumsum(0)
        self.bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        """[B + 1] int32, or one more: row b is at bounds[b] up to bounds[b + 1]."""
        self.longest = max(*micro.lengths, self._spare)
        before = self.bounds[: len(micro.lengths), None] + columns[micro.first - 1 : -1]
        self.predictions = before[self._wanted].long()
        """[N] places in [1, T] of what predicts the tokens in columns first.., row by row."""

    def packed(self, values: Tensor) -> Tensor:
        """[B, S, ...] -> [1, T, ...]"""
        packed = values[self._real][None]
        return (
            torch.cat([packed, packed.new_zeros((1, self._spare, *packed.shape[2:]))], 1)
            if self._spare
            else packed
        )

    def wanted(self, values: Tensor) -> Tensor:
        """[B, S - first, ...] -> [1, N, ...]"""
        return values[self._wanted][None]

    def padded(self, values: Tensor) -> Tensor:
        """[1, N] -> [B, S - first], 0 in the padding."""
        out = values.new_zeros(self._wanted.shape)
        return out.masked_scatter(self._wanted, values)

    def parameters(self) -> Any:
        """What megatron-core's attention is told."""
        return parameters(self.bounds, self.longest)


def parameters(bounds: Tensor, longest: int) -> Any:
    """Rows between `bounds` [B + 1] int32. total_tokens: without it state leaks from row to row in hybrid models."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=int(bounds[-1]),
    )
