"""Names of weights: the model's own, and those of the Hugging Face checkpoint that everybody else uses."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import safe_open

from omnifleet.errors import OmnifleetError, Reason, invalid

_SHOWN = 6


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. Raises OmnifleetError(MODEL_MISSING)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / "model.safetensors"]
    for path in [folder / "config.json", *files]:
        if not path.exists():
            raise OmnifleetError(
                Reason.MODEL_MISSING,
                f"{folder} is no safetensors checkpoint: {path.name} is missing",
                knob="model.path",
            )
    return files


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a checkpoint folder; reads headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(folder):
        with safe_open(path, "np") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    _refuse_legacy(shapes, folder)
    return shapes


def _refuse_legacy(names: Iterable[str], folder: Path) -> None:
    """Nemotron Omni checkpoints of before the dedicated model class keep everything under `llava_model.`."""
    legacy = next((name for name in names if name.startswith("llava_model.")), None)
    if legacy is not None:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{folder} has legacy keys ({legacy}): no current model class reads them. Export it to the Hugging Face "
            "layout with the release that wrote it, and give that folder",
            knob="model.path",
        )


def source_names(model: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Model name -> checkpoint name, for every tensor of the checkpoint.

    transformers 5 renames while it loads; the renaming is undone by its own `revert_weight_conversion`. A tied head
    that the checkpoint does not store is left out. Raises OmnifleetError(UNSUPPORTED) if the two sides do not hold
    the same tensors: a refit would then be incomplete.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    live = {id(tensor): name for name, tensor in state.items()}
    names: dict[str, str] = {}
    for source, tensor in revert_weight_conversion(model, dict(state)).items():
        name = live.get(id(tensor))
        if name is not None and source in shapes and tuple(tensor.shape) == shapes[source]:
            names[name] = source
    tied = getattr(model, "_tied_weights_keys", None) or {}
    missing = sorted(set(shapes) - set(names.values()))
    extra = sorted(set(state) - set(names) - set(tied))
    if missing or extra:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{type(model).__name__} and its checkpoint hold different tensors: only in the checkpoint "
            f"{missing[:_SHOWN]}, only in the model {extra[:_SHOWN]}",
            knob="model.path",
        )
    return names


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that any glob pattern matches. Raises OmnifleetError(INVALID_CONFIG) for a pattern that matches none."""
    known = sorted(names)
    frozen: set[str] = set()
    for pattern in patterns:
        found = {name for name in known if fnmatchcase(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, known, n=_SHOWN, cutoff=0.0)
            raise invalid(
                f"model.freeze pattern {pattern!r} matches no weight; near it: {', '.join(near)}",
                knob="model.freeze",
                reason=Reason.INVALID_CONFIG,
            )
        frozen |= found
    if known and len(frozen) == len(known):
        raise invalid(
            "model.freeze leaves nothing to train", knob="model.freeze", reason=Reason.INVALID_CONFIG
        )
    return frozen
