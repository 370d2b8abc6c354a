"""Image processors by content: what a checkpoint says about its own, without the library that runs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.address import canonical_json
from omnifleet.errors import OmnifleetError, Reason, invalid

_NOT_SEMANTIC = frozenset(
    {
        "image_processor_type",
        "feature_extractor_type",
        "processor_class",
        "auto_map",
        "transformers_version",
        "name_or_path",
        "return_tensors",
    }
)
_PATH_ENDINGS = ("_path", "_dir", "_file", "_folder")
_PLACEHOLDERS = ("image_token_id", "image_token_index", "img_context_token_id")


@dataclass(frozen=True, slots=True)
class ImageProcessorSpec:
    """A processor class and the settings that change its output; no path, no version of a library."""

    class_name: str
    config: dict[str, Any]

    @property
    def config_json(self) -> str:
        """Canonical JSON of `config`: the form that goes over the wire and into fingerprints."""
        return canonical_json(self.config).decode()


def read_image_processor(model_dir: Path) -> ImageProcessorSpec:
    """The image processor of a Hugging Face checkpoint folder.

    Reads preprocessor_config.json, or the `image_processor` part of processor_config.json. Path-like keys and keys
    that change no pixel are dropped, so that equal processors of different checkpoints are equal.
    Raises OmnifleetError(MODEL_MISSING) if the folder has neither file, INVALID_CONFIG if it is malformed.
    """
    body = _image_processor_body(model_dir)
    class_name = body.get("image_processor_type") or body.get("feature_extractor_type")
    if not isinstance(class_name, str):
        raise invalid(
            f"{model_dir}: the image processor has no image_processor_type", reason=Reason.INVALID_CONFIG
        )
    config = {key: value for key, value in body.items() if _changes_pixels(key)}
    # Checkpoints of transformers 4 name the torch class by this suffix; 5 dropped it.
    return ImageProcessorSpec(class_name.removesuffix("Fast"), config)


def image_token_id(model_dir: Path) -> int:
    """Id of the placeholder token that stands for an image feature, from config.json.

    Raises OmnifleetError(MODEL_MISSING) without the file, INVALID_CONFIG if the model has no such token.
    """
    path = model_dir / "config.json"
    config = _read_json(path)
    if config is None:
        raise OmnifleetError(Reason.MODEL_MISSING, f"{path} is missing", knob="model.path")
    for name in _PLACEHOLDERS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise invalid(f"{path} names no image token ({', '.join(_PLACEHOLDERS)})", reason=Reason.INVALID_CONFIG)


def _image_processor_body(model_dir: Path) -> dict[str, Any]:
    body = _read_json(model_dir / "preprocessor_config.json")
    if body is not None:
        return body
    nested = (_read_json(model_dir / "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, dict):
        return nested
    raise OmnifleetError(
        Reason.MODEL_MISSING,
        f"{model_dir} has neither preprocessor_config.json nor an image processor in processor_config.json",
        knob="model.path",
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {error}", reason=Reason.INVALID_CONFIG) from error
    if not isinstance(body, dict):
        raise invalid(f"{path} is not a JSON object", reason=Reason.INVALID_CONFIG)
    return body


def _changes_pixels(key: str) -> bool:
    return key not in _NOT_SEMANTIC and not key.startswith("_") and not key.endswith(_PATH_ENDINGS)
