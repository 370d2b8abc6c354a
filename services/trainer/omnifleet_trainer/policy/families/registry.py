"""Which adapter a transformers model is seen through in the automodel backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnifleet_trainer.policy.families.nemotron import NemotronOmni
from omnifleet_trainer.policy.families.qwen import Qwen2VL, Qwen3VL, TextModel, unknown_family

FAMILIES: dict[str, type[TextModel]] = {
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen2VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "nemotron_h_omni": NemotronOmni,
}
"""By model_type of the config."""
_CHANGED = {
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "Qwen3VLMoeForConditionalGeneration",
}


def family_of(model: Any) -> TextModel:
    """The adapter of a transformers model. Raises OmnifleetError(UNSUPPORTED) for another vision family."""
    if getattr(model.config, "vision_config", None) is None:
        return TextModel(model)
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        raise unknown_family(model.config.model_type, "automodel", FAMILIES)
    return family(model)


def needs_filling(source: Path) -> bool:
    """Whether AutoModel cannot load the checkpoint into weights that are spread over ranks: its loader for these renames
    tensors, but neither cuts nor turns any (0.7.0)."""
    return bool(_CHANGED & set(json.loads((source / "config.json").read_text()).get("architectures") or ()))
