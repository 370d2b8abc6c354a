"""Files of a checkpoint's folder that say what its prompts look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.prompt import Brackets


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None without the file. Raises OmnifleetError(INVALID_CONFIG) for what is none."""
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {error}", reason=Reason.INVALID_CONFIG) from error
    if not isinstance(body, dict):
        raise invalid(f"{path} is not a JSON object", reason=Reason.INVALID_CONFIG)
    return body


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """Its config.json. Raises OmnifleetError: MODEL_MISSING without it, INVALID_CONFIG."""
    path = model_dir / "config.json"
    config = read_json(path)
    if config is None:
        raise OmnifleetError(Reason.MODEL_MISSING, f"{path} is missing", knob="model.path")
    return config


def bracket_ids(model_dir: Path, words: tuple[str, str]) -> Brackets:
    """The tokenizer's ids of two words of one token each. Raises OmnifleetError(INVALID_CONFIG) if it lacks one."""
    tokenizer = read_json(model_dir / "tokenizer.json") or {}
    ids = {added.get("content"): added.get("id") for added in tokenizer.get("added_tokens") or ()}
    opening, closing = (ids.get(word) for word in words)
    if not isinstance(opening, int) or not isinstance(closing, int):
        raise invalid(f"{model_dir}/tokenizer.json has no {' or '.join(words)}", reason=Reason.INVALID_CONFIG)
    return (opening,), (closing,)
