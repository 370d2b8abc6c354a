"""Checkpoint folders of three sizes with a configuration and a tensor table only: their safetensors file is a hole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "2B": {
        "text": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        "vision": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4},
    },
    "7B": {
        "text": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "vision": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4},
    },
}
"""What a size changes in the tiny Qwen2-VL's configuration. Output heads are untied."""


def write_size(size: str, out: Path) -> dict[str, tuple[int, ...]]:
    """Write the folder `out`; names and shapes of its tensors, all bfloat16. Needs transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    tiny = out / "tiny"
    write_checkpoint(tiny)
    for file in tiny.glob("*.json*"):
        shutil.copy(file, out)
    config = json.loads((tiny / "config.json").read_text())
    changes = SIZES[size]
    config["text_config"].update(changes.get("text", {}))
    config["vision_config"].update(changes.get("vision", {}))
    config["dtype"] = "bfloat16"
    if changes:
        text = config["text_config"]
        for name in ("layer_types", "head_dim"):
            text.pop(name, None)
        (text.get("rope_parameters") or text["rope_scaling"])["mrope_section"] = [16, 24, 24]
    (out / "config.json").write_text(json.dumps(config))
    names = json.loads(_header(tiny / "model.safetensors"))
    shutil.rmtree(tiny)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(out))
    shapes = {_saved_name(name, names): tuple(t.shape) for name, t in model.state_dict().items()}
    _write_hole(out / "model.safetensors", shapes)
    return shapes


def _saved_name(name: str, saved: dict[str, Any]) -> str:
    """transformers 5 saves Qwen2-VL under other names than its modules have: take those of the tiny checkpoint."""
    for old, new in (("", ""), ("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(old):
            candidate = new + name.removeprefix(old)
            if _without_numbers(candidate) in {_without_numbers(other) for other in saved}:
                return candidate
    raise ValueError(f"{name} is in no Qwen2-VL checkpoint")


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _header(file: Path) -> bytes:
    with file.open("rb") as source:
        return source.read(int.from_bytes(source.read(8), "little"))


def _write_hole(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + end)
