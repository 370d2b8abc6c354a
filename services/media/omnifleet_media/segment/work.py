"""Runs one image processor of transformers on canonical pixels. Runs in a processor process (role "segments")."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_media.sandbox.frames import Header

_KEEP = 8  # built processors, by class and config
_built: dict[tuple[str, str], Any] = {}


def prepare() -> Header:
    """Import torch and transformers; one thread each, since processes are the unit of parallelism."""
    import torch
    import transformers
    from transformers import Qwen2VLImageProcessor  # noqa: F401  (loads torchvision too)

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return {"library": f"transformers {transformers.__version__}"}


def work(header: Header, body: bytearray) -> tuple[Header, Sequence[bytes]]:
    """header: class_name, config, config_json, shape [H, W, 3]. Answers token_count, grid and a safetensors file."""
    from PIL import Image

    pixels = np.frombuffer(body, np.uint8).reshape(header["shape"])
    processor = _processor(header["class_name"], header["config_json"], header["config"])
    try:
        output = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        # Deterministic and about this picture and this config (e.g. an aspect ratio beyond the family's limit).
        raise invalid(
            f"{header['class_name']} refuses a {pixels.shape[1]} x {pixels.shape[0]} picture: {error}"
        ) from error
    return _packed(processor, output, header["class_name"])


def _packed(processor: Any, output: Any, class_name: str) -> tuple[Header, Sequence[bytes]]:
    import torch
    from safetensors.torch import save

    grid = output.get("image_grid_thw")
    if grid is None:
        raise OmnifleetError(
            Reason.UNSUPPORTED, f"{class_name} answers no image_grid_thw: its tokens can't be counted"
        )
    tensors = {
        "image_grid_thw": grid.to(torch.int64).contiguous(),
        "pixel_values": output["pixel_values"].to(torch.float32).contiguous(),
    }
    token_count = int(grid.prod()) // int(processor.merge_size) ** 2
    return {"token_count": token_count, "grid": grid[0].tolist()}, [save(tensors)]


def _processor(class_name: str, config_json: str, config: dict[str, Any]) -> Any:
    key = (class_name, config_json)
    if key not in _built:
        import transformers

        if len(_built) >= _KEEP:
            _built.pop(next(iter(_built)))
        try:
            _built[key] = getattr(transformers, class_name).from_dict(dict(config))
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise invalid(f"{class_name} can't be built from this config: {error}") from error
    return _built[key]


def library() -> str:
    """Name and version of the library that makes segments. Raises OmnifleetError(UNSUPPORTED) if it is not installed."""
    try:
        return f"transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            "segments need transformers and torch here",
            knob="pip install 'omnifleet-media[segments]'",
        ) from None
