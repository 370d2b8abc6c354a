"""What megatron-bridge 0.6 needs to hold a Nemotron Omni without Transformer Engine and mamba-ssm, and that it keeps every weight.

Not a backend: `policy.megatron` has no adapter for the family. The list below is what one would have to bring on a CPU; with CUDA,
Transformer Engine and mamba-ssm only the first and the fifth remain.

1. `llm_config` on the config: the checkpoint's own code has it, transformers' native class calls it `text_config`.
2. layers without Transformer Engine in the three places that are hard-coded: hybrid stack, tower, and the stack's last norm.
3. `mamba_ssm` (a stand-in suffices to build, not to compute).
4. a projector whose first linear layer has its norm inside; without Transformer Engine the norm `mlp1.0` is lost without a word.
5. a smaller tower: `_build_vision_config` writes ViT-H's sizes, 650 million weights, whatever the checkpoint says.
6. a tracker of CUDA's random state that does nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnifleet_trainer.tiny.hybrid import write_hybrid

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

CHILD = """
import contextlib, logging, sys, types, warnings
from importlib.machinery import ModuleSpec
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from safetensors.torch import load_file


def stand_in(name, **values):
    module = types.ModuleType(name)
    module.__path__, module.__spec__, module.__version__ = [], ModuleSpec(name, None, is_package=True), "9.0.0"
    module.__dict__.update(values)
    sys.modules[name] = module


class GatedNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))


class NoState:
    def fork(self, *a, **k):
        return contextlib.nullcontext()

    def __getattr__(self, name):
        return lambda *a, **k: None


def uncalled(*args, **kwargs):
    raise RuntimeError("only built here, not computed")


for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "causal_conv1d"):
    stand_in(name, causal_conv1d_fn=uncalled)
stand_in("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=uncalled)
stand_in("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm, rmsnorm_fn=uncalled)
stand_in("mamba_ssm.ops.triton.ssd_combined",
         mamba_chunk_scan_combined=uncalled, mamba_split_conv1d_scan_combined=uncalled)
from omnifleet_trainer.compat import megatron as compat
compat.install()
folder = sys.argv[1]
with compat.on_cpu():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.nemotron_omni import nemotron_omni_provider as theirs
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import random as states
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear as Column, RowParallelLinear as Row
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec as Spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules as Parts

    class Normed(Column):
        def __init__(self, input_size, output_size, *, config, **more):
            super().__init__(input_size, output_size, config=config, **more)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    def small(provider, config, made=theirs.NemotronOmniModelProvider._build_vision_config):
        tower = made(provider, config)
        tower.num_layers, tower.num_attention_heads, tower.num_query_groups = 2, 1, 1
        tower.hidden_size, tower.ffn_hidden_size, tower.kv_channels = 64, 256, 64
        return tower

    mamba = Spec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=Column, out_proj=Row))
    attention = Spec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=Column, core_attention=DotProductAttention, linear_proj=Row))
    mlp = Spec(module=MLP, submodules=MLPSubmodules(linear_fc1=Column, linear_fc2=Row))
    theirs.hybrid_stack_spec = Spec(module=HybridStack, submodules=HybridStackSubmodules(
        mamba_layer=Spec(module=MambaLayer, submodules=MambaLayerSubmodules(norm=Norm, mixer=mamba, mamba_bda=add)),
        attention_layer=Spec(module=TransformerLayer, submodules=Parts(
            input_layernorm=Norm, self_attention=attention, self_attn_bda=add)),
        mlp_layer=Spec(module=MLPLayer, submodules=Parts(pre_mlp_layernorm=Norm, mlp=mlp, mlp_bda=add))))
    theirs.get_vit_layer_with_transformer_engine_spec = get_vit_layer_with_local_spec
    theirs.get_language_mlp_submodules = lambda spec: MLPSubmodules(linear_fc1=Normed, linear_fc2=Row)
    theirs.NemotronOmniModelProvider._build_vision_config = small
    hybrid_block.TENorm = Norm
    states._CUDA_RNG_STATE_TRACKER, states._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoState(), True
    logging.disable(logging.WARNING)
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.hf_pretrained.config
    assert not hasattr(config, "llm_config")
    config.llm_config = config.text_config
    provider = bridge.to_megatron_provider(load_weights=False)
    off = ("apply_rope_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion",
           "bias_dropout_fusion", "persist_layer_norm", "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap")
    settings = dict.fromkeys(off, False) | {"use_cpu_initialization": True, "seq_length": 256}
    provider.apply_overrides_and_finalize(dtype=torch.float32, overrides=settings)
    provider.initialize_model_parallel(seed=None)
    model = provider.provide()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    bridge.load_hf_weights([model])
    source = load_file(folder + "/model.safetensors")
    back = {name: tensor.clone() for name, tensor in bridge.export_hf_weights([model], cpu=True, show_progress=False)}
    assert set(source) - set(back) == {"vision_model.radio_model.summary_idxs"}, "a buffer"
    assert not set(back) - set(source)
    different = [name for name in back if not torch.equal(source[name], back[name])]
    assert not different, different
print("RESULT", len(back))
"""


def test_bridge_keeps_every_weight_of_nemotron_omni(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RESULT 60" in done.stdout
