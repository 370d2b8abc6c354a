"""Which rank of a tensor-parallel group holds what of a dense Qwen of transformers (1909.08053): columns of the projections
into a layer's middle, rows of those out of it, columns of the head.

Embedding, tower and norms are whole on every rank. The norms of query and key see a rank's own heads only, so their gradients
are parts of a sum; those of the rest are alike, and averaged so that they stay so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid

_DENSE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_LAYER = "model.language_model.layers.*."


def check_tensor_parallel(source: Path, size: int) -> None:
    """Whether the checkpoint's model can be divided by `size`. Raises OmnifleetError(UNSUPPORTED, INVALID_CONFIG)."""
    body: dict[str, Any] = json.loads((source / "config.json").read_text())
    kind = body.get("model_type")
    if kind not in _DENSE:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the automodel backend divides the layers of {', '.join(_DENSE)}, not of {kind}: set tp = 1",
            knob="trainer.parallel.tp",
        )
    text = body.get("text_config", body)
    for field in _DIVIDED:
        if text[field] % size:
            raise invalid(
                f"tp = {size} does not divide the model's {field} = {text[field]}",
                knob="trainer.parallel.tp",
                reason=Reason.INVALID_CONFIG,
            )


def tensor_plan(source: Path) -> dict[str, Any]:
    """What AutoModel's parallelizer is told, by the model's names. A head that is the embedding stays whole."""
    from nemo_automodel.components.distributed.parallel_styles import ReplicatedWithGradAllReduce
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.placement_types import Replicate

    body: dict[str, Any] = json.loads((source / "config.json").read_text())
    into = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, Any] = {_LAYER + name: ColwiseParallel() for name in into}
    plan |= {_LAYER + name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    if body["model_type"] == "qwen3_vl":
        plan |= {_LAYER + f"self_attn.{name}_norm": ReplicatedWithGradAllReduce() for name in "qk"}
    if not body.get("tie_word_embeddings", body.get("text_config", {}).get("tie_word_embeddings", False)):
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
