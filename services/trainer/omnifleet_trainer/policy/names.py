"""Names of weights in a Hugging Face checkpoint, which everybody uses; `held.py` says where the model has them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

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
