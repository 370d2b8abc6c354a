"""What a checkpoint folder says of itself, read from its headers: no torch, no weights in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import DTYPE_BYTES


def read_config(model: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises MODEL_MISSING with the path if the folder holds no model."""
    path = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            f"{model} is not a checkpoint folder: {path.name} cannot be read",
            knob="model.path",
        ) from error
    return config


def read_table(model: Path) -> tuple[refit_pb2.TensorSpec, ...]:
    """Names, dtypes and shapes of all tensors, sorted by name, from the safetensors headers.

    Raises MODEL_MISSING if there is no safetensors file or one is damaged.
    """
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise OmnifleetError(Reason.MODEL_MISSING, f"{model} has no safetensors file", knob="model.path")
    specs = [spec for file in files for spec in _read_header(file)]
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _read_header(file: Path) -> list[refit_pb2.TensorSpec]:
    try:
        with file.open("rb") as source:
            size = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(size)) if size <= file.stat().st_size else None
    except (OSError, ValueError) as error:
        raise OmnifleetError(
            Reason.MODEL_MISSING, f"{file} cannot be read: {error}", knob="model.path"
        ) from error
    if not isinstance(header, dict):
        raise OmnifleetError(Reason.MODEL_MISSING, f"{file} is cut short", knob="model.path")
    header.pop("__metadata__", None)
    return [_spec(name, entry) for name, entry in header.items()]


def _spec(name: str, entry: dict[str, Any]) -> refit_pb2.TensorSpec:
    count = 1
    for size in entry["shape"]:
        count *= size
    return refit_pb2.TensorSpec(
        name=name,
        dtype=entry["dtype"],
        shape=entry["shape"],
        bytes=count * DTYPE_BYTES.get(entry["dtype"], 0),
    )
