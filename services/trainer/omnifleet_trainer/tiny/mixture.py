"""A small Qwen3-VL whose language layers are mixtures of experts, with random weights, in the hub's layout.

Its tokenizer and processors are those of the dense tiny Qwen3-VL. What transformers 5.18 writes is not what the hub has, and what
other loaders read: experts lie (E, out, in) for (E, in, out), and `norm_topk_prob` is missing. Both are set right here.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from omnifleet_trainer.tiny.checkpoint import write_checkpoint

EXPERTS, CHOSEN, WIDTH = 4, 2, 96
"""Experts of a layer, how many a token goes to, and the width of one: no power of two, so that no axis is taken for another."""


def write_mixture(out: Path, *, seed: int = 0, hidden: int = 128, layers: int = 2) -> None:
    """Write the checkpoint folder `out`; equal arguments give equal weights. hidden: model width, a multiple of 64."""
    write_checkpoint(out, seed=seed, hidden=hidden, layers=layers, family="qwen3_vl")
    body = json.loads((out / "config.json").read_text())
    body["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": WIDTH,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    body["vision_config"]["model_type"] = "qwen3_vl_moe"
    body |= {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    config = Qwen3VLMoeConfig.from_dict(body)
    generation = (out / "generation_config.json").read_bytes()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3VLMoeForConditionalGeneration(config).save_pretrained(out)
    (out / "generation_config.json").write_bytes(generation)
    _as_the_hub_has_it(out)


def _as_the_hub_has_it(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    hidden = next(t.shape[1] for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    for name, tensor in tensors.items():
        gate_up, down = name.endswith("experts.gate_up_proj"), name.endswith("experts.down_proj")
        if (gate_up and tensor.shape[1] != hidden) or (down and tensor.shape[2] != hidden):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((folder / "config.json").read_text())
    body["text_config"]["norm_topk_prob"] = True
    (folder / "config.json").write_text(json.dumps(body, indent=1) + "\n")
