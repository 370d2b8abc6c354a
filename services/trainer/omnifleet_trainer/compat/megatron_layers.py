"""Layers of megatron-core without Transformer Engine: its local specs, with attention by torch.

Checked with megatron-core 0.19.2 and megatron-bridge 0.6.2. The local specs' own core attention forms all scores and
refuses packed sequences, which the Qwen3-VL tower uses for its pictures; this one is torch's
`scaled_dot_product_attention`, one call a segment where sequences are packed. Bridge's weight maps know the local
layout. Its norms know sequence parallelism, which the local specs' refuse, and its attention looks over the ranks of a
context-parallel group. What these layers cannot do: FP8, grouped experts.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class TorchCoreAttention(DotProductAttention):  # type: ignore[misc]
    """Core attention by torch. Padding must be on the right: a causal mask then hides it from all that counts.

    group: of ranks that hold other tokens of the same sequences; then attention_mask says what is seen, [S, S x ranks] bool.
    """

    group: Any = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[S, B, heads, d] -> [S, B, heads x d]; packed: [T, heads, d] (or [T, 1, heads, d]) -> [T, heads x d]."""
        assert attention_bias is None
        if self.group is not None:
            return self._over_ranks(query, key, value, attention_mask)
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        if packed_seq_params is None:
            rows = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            mixed = self._attend(*rows, causal=causal)
            return mixed.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        heads = [x.reshape(x.shape[0], x.shape[-2], x.shape[-1]).transpose(0, 1) for x in (query, key, value)]
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend(*(x[None, :, start:end] for x in heads), causal=causal)[0].transpose(0, 1)
            for start, end in itertools.pairwise(bounds)
            if end > start
        ]
        return torch.cat(parts).reshape(query.shape[0], -1)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[S, heads, d] of this rank -> [S, heads x d]. Gradients of keys and values come back added up."""
        assert mask is not None
        whole = (gather_from_sequence_parallel_region(x.contiguous(), group=self.group) for x in (key, value))
        heads = (
            x.reshape(x.shape[0], x.shape[-2], x.shape[-1]).transpose(0, 1)[None] for x in (query, *whole)
        )
        mixed = self._attend(*heads, causal=False, mask=mask)
        return mixed[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=causal and query.shape[2] > 1,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )


class SequenceNorm:
    """Torch's norm, whose weights say whether their gradients are of a part of the tokens (sequence parallelism)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """The arguments of megatron-core's norms."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def attend_over(module: torch.nn.Module, group: Any) -> None:
    """All attention in `module` looks over the ranks of `group`; None: each over its own tokens."""
    for part in module.modules():
        if isinstance(part, TorchCoreAttention):
            part.group = group


def use_in_blocks() -> None:
    """The norm after the last layer is named in megatron-core's module; ours in its place."""
    from megatron.core.transformer import transformer_block

    transformer_block.LayerNormImpl = SequenceNorm


def gpt_spec(*, qk_layernorm: bool, experts: int | None = None, normalization: str = "RMSNorm") -> Any:
    """Spec of a language layer; of a mixture if it has `experts`, computed one after the other."""
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=qk_layernorm,
        normalization=normalization,
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceNorm
    if qk_layernorm:
        heads = spec.submodules.self_attention.submodules
        heads.q_layernorm = heads.k_layernorm = SequenceNorm
    return _by_torch(spec)


def language_spec(config: Any) -> Any:
    """What `provider.transformer_layer_spec` is set to."""
    return gpt_spec(
        qk_layernorm=config.qk_layernorm,
        experts=config.num_moe_experts,
        normalization=config.normalization,
    )


def use_in_qwen3() -> None:
    """Bridge's Qwen3-VL names Transformer Engine's layers in its modules; put these in their place."""
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider as provider
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model

    provider.get_gpt_layer_with_transformer_engine_spec = lambda **settings: gpt_spec(
        qk_layernorm=settings["qk_layernorm"], experts=settings["num_experts"]
    )
    model.get_vit_layer_with_transformer_engine_spec = lambda: _by_torch(get_vit_layer_with_local_spec())
    model.TENorm = WrappedTorchNorm
    model.TEColumnParallelLinear, model.TERowParallelLinear = ColumnParallelLinear, RowParallelLinear


def use_exact_gelu(core: torch.nn.Module) -> int:
    """Give the mergers of Bridge's Qwen3-VL the activation that they were trained with; how many were changed.

    Bridge takes the tower's tanh approximation there too, transformers and vLLM the exact function: logprobs of a tiny
    model differ by 3e-4.
    """
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import Qwen3VLVisionPatchMerger

    mergers = [part for part in core.modules() if isinstance(part, Qwen3VLVisionPatchMerger)]
    for merger in mergers:
        merger.activation_func = F.gelu
    return len(mergers)


def _by_torch(spec: Any) -> Any:
    spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    return spec
