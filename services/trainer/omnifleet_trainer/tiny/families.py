"""Configs and processors of the families that a tiny checkpoint can be of.

All share one text model (heads of 64) and one tower of a single head; they differ where the families do.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import transformers

from omnifleet.errors import Reason, invalid

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FAMILIES: tuple[Family, ...] = get_args(Family)
HEAD = 64
PATCH: dict[Family, int] = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
MODELS: dict[Family, str] = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_CONFIGS: dict[Family, str] = {
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
}
PROCESSORS: dict[Family, tuple[str, str]] = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
"""Processor and video processor; pictures go through Qwen2VLImageProcessor in all three."""


def known_family(name: str, *, warm: bool) -> Family:
    """The family of that name. Raises OmnifleetError(INVALID_CONFIG) for another, or if its model cannot be warm-started:
    Qwen3-VL's language layers also want features of the tower's inner layers, which the lessons do not teach."""
    known = [family for family in FAMILIES if not (warm and family == "qwen3_vl")]
    for family in known:
        if family == name:
            return family
    raise invalid(
        f"no {'warm-started ' if warm else ''}tiny model of family {name!r}; there is {', '.join(known)}",
        knob="model.family",
        reason=Reason.INVALID_CONFIG,
    )


def family_config(
    family: Family, vocabulary: dict[str, int], *, hidden: int, layers: int, tie_embeddings: bool
) -> Any:
    """The transformers config; its class's name is in MODELS. vocabulary: token -> id."""
    heads = hidden // HEAD
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": -(-len(vocabulary) // 64) * 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
        "tie_word_embeddings": tie_embeddings,
    }
    if family == "qwen3_vl":
        text |= {
            "head_dim": HEAD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
        }
    config = getattr(transformers, _CONFIGS[family])(
        text_config=text,
        vision_config=_vision(family, hidden),
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=tie_embeddings,
        dtype="float32",
    )
    return config


def _vision(family: Family, hidden: int) -> dict[str, Any]:
    shared = {
        "num_heads": 1,
        "patch_size": PATCH[family],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "initializer_range": 0.05,
    }
    match family:
        case "qwen2_vl":
            return shared | {"depth": 1, "embed_dim": HEAD, "hidden_size": hidden, "mlp_ratio": 2}
        case "qwen2_5_vl":
            return shared | {
                "depth": 2,
                "hidden_size": HEAD,
                "intermediate_size": 2 * HEAD,
                "out_hidden_size": hidden,
                "window_size": 4 * PATCH[family],
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
            }
        case "qwen3_vl":
            return shared | {
                "depth": 2,
                "hidden_size": HEAD,
                "intermediate_size": 2 * HEAD,
                "out_hidden_size": hidden,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            }
