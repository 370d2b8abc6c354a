"""Bridge's Nemotron Omni without Transformer Engine, and of any size.

Checked with megatron-core 0.19.2 and megatron-bridge 0.6.2. Its provider names Transformer Engine's layers in four places and
the sizes of RADIO ViT-H in one; megatron-core's hybrid block names one layer more. Its squared ReLU is compiled for one number of
tokens after another, and saves other tensors when a layer is computed again. Inside `building()` these are local
layers with attention by torch, the sizes of the checkpoint, and the exact GELU that transformers and vLLM take
(Bridge takes an approximation of it). Mamba layers ask CUDA's generator, which a CPU lacks, for their first weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import random as generators
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: F401  (the spec names it)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from omnifleet_trainer.compat.mamba import stand_ins
from omnifleet_trainer.compat.megatron_layers import SequenceNorm, TorchCoreAttention

LARGEST = 2048
"""Pixels of the largest side that Bridge's tower has embeddings of places for."""


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, not compiled."""
    return F.relu(x).square()


class RmsLayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer with a norm before it, in one module and under the names that Bridge's maps know. By its own name they know
    that the norm is whole on each rank."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))
        self._eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *args: Any, **more: Any) -> Any:
        """[..., input_size] -> ([..., output_size], bias)."""
        normed = F.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **more)


def hybrid_spec(experts: int | None) -> Any:
    """Spec of a stack of Mamba, attention, MLP and, with `experts` of them, expert layers."""
    linear = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=TorchCoreAttention, linear_proj=RowParallelLinear
    )
    parts = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=SequenceNorm,
                mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=SequenceNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=attention,
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=SequenceNorm,
                mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(**linear)),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    if experts:
        parts["moe_layer"] = ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=SequenceNorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**parts))


@contextlib.contextmanager
def building(vision: Any, experts: int | None) -> Iterator[None]:
    """Inside, Bridge builds a Nemotron Omni with the tower of `vision` (transformers' RADIO config)."""
    from megatron.bridge.models.nemotron_omni import nemotron_omni_provider as provider

    name_local_experts()
    made = provider.NemotronOmniModelProvider._build_vision_config

    def sized(self: Any, config: Any) -> Any:
        tower = made(self, config)
        tower.num_layers, tower.hidden_size = vision.num_hidden_layers, vision.hidden_size
        tower.num_attention_heads = tower.num_query_groups = vision.num_attention_heads
        tower.kv_channels = vision.hidden_size // vision.num_attention_heads
        tower.ffn_hidden_size = int(vision.hidden_size * vision.mlp_ratio)
        tower.activation_func = F.gelu
        return tower

    def tower_spec() -> Any:
        spec = get_vit_layer_with_local_spec()
        spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
        return spec

    projector = MLPSubmodules(linear_fc1=RmsLayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    changes = [
        (provider, "hybrid_stack_spec", hybrid_spec(experts)),
        (provider, "get_vit_layer_with_transformer_engine_spec", tower_spec),
        (provider, "get_language_mlp_submodules", lambda _: projector),
        (provider.NemotronOmniModelProvider, "_build_vision_config", sized),
        (provider, "squared_relu", squared_relu),
        (hybrid_block, "TENorm", SequenceNorm),
    ]
    if not torch.cuda.is_available():
        changes += [
            (generators, "_CUDA_RNG_STATE_TRACKER", _NoGenerator()),
            (generators, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        ]
    if stand_ins():
        # Asks for versions of the packages; what stands in for them packs.
        mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def name_local_experts() -> None:
    """Bridge's maps for Nemotron Omni know grouped experts alone, those of its text model also experts one by one: add them.
    Idempotent."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.nemotron_omni.nemotron_omni_bridge import NemotronOmniBridge

    known = NemotronOmniBridge.mapping_registry
    if hasattr(known, "names_local_experts"):
        return

    def mapping_registry(self: Any) -> Any:
        registry = known(self)
        layer = "llava_model.language_model.decoder.layers.*.mlp.experts.local_experts.*"
        source = "language_model.backbone.layers.*.mixer.experts.*"
        added = [
            AutoMapping(f"{layer}.linear_fc1.weight", f"{source}.up_proj.weight"),
            AutoMapping(f"{layer}.linear_fc2.weight", f"{source}.down_proj.weight"),
        ]
        return type(registry)(*registry.mappings, *added)

    mapping_registry.names_local_experts = True  # type: ignore[attr-defined]
    NemotronOmniBridge.mapping_registry = mapping_registry


class _NoGenerator:
    """First weights from the default generator: those of the checkpoint replace them."""

    def fork(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing changes inside."""
        return contextlib.nullcontext()
