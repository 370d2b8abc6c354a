"""The recorded plan on vLLM's own classes, before the CPU build packs them: what the plan makes is what the loader makes.

With two ranks each is a process of its own, in vLLM's own tensor-parallel groups over gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


def planned(folder: Path, meeting: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank's child says."""
    command = [sys.executable, "-m", "tests.integration.refit_plan_child", str(folder), str(meeting)]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    results = []
    try:
        for child in children:
            said, errors = child.communicate(timeout=280)
            assert child.returncode == 0, errors[-4000:]
            (line,) = [line for line in said.splitlines() if line.startswith("RESULT ")]
            results.append(json.loads(line.removeprefix("RESULT ")))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return results


def check(result: dict[str, Any]) -> None:
    assert result["moved"] == [], "recording moves nothing"
    assert result["different"] == [] and result["checked"] == []
    assert result["missing"] == [], "its own slices are all that a rank reads"
    assert result["unread"] == [] and result["untouched"] == []


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["untied", "tied"])
def test_a_plan_of_qwen2_vl_equals_its_loader(tmp_path: Path, tied: bool) -> None:
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", seed=0, tie_embeddings=tied)
    (result,) = planned(tmp_path / "model", tmp_path / "meet", 1)
    check(result)
    assert result["moves"] >= result["sources"] and len(result["fused"]) >= 4 and result["share"] == 1.0


@pytest.mark.soak
def test_plans_of_two_ranks_of_qwen2_vl_read_their_own_halves(tmp_path: Path) -> None:
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", seed=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["vision_config"]["num_heads"] = 2  # one head cannot be split
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for result in planned(tmp_path / "model", tmp_path / "meet", 2):
        check(result)
        assert len(result["fused"]) >= 4 and 0.5 <= result["share"] < 0.75


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_of_a_mixture_stack_the_experts_of_each_rank(tmp_path: Path, ranks: int) -> None:
    write_mixture(tmp_path / "model")
    for result in planned(tmp_path / "model", tmp_path / "meet", ranks):
        check(result)
        assert len(result["stacked"]) == 4, "two layers of stacked gate-up and down"
        assert result["share"] == 1.0 if ranks == 1 else 0.5 <= result["share"] < 0.75


def write_mixture(folder: Path) -> None:
    """A tiny Qwen3-MoE checkpoint with random weights; the names are those of its published checkpoints."""
    hidden, heads, head, experts, inner, layers, vocabulary = 128, 2, 64, 4, 64, 2, 256
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (heads * head, hidden) for name in "qkv"}
        shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{at}mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            names = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            shapes |= {f"{at}mlp.experts.{expert}.{name}_proj.weight": s for name, s in names.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
