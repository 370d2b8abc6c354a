"""Rows of NeMo Gym's video GRPO as prompt rows: several clips, pictures and sounds too; cached frames as one clip."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet.errors import invalid
from omnifleet.types import MediaKind
from omnifleet_trainer.data.gym_rows import clips_of, file_url, local_path, parts_of
from omnifleet_trainer.data.rows import PromptRow
from omnifleet_trainer.data.sets import SetRows, shuffled
from omnifleet_trainer.data.tables import open_table

_OWN = ("responses_create_params", "expected_answer")


def load_gym_video(path: Path, split: str, seed: int, prompt: str) -> Sequence[PromptRow]:
    """Rows of a .jsonl file, or of `split`*.jsonl in a folder, shuffled by `seed`. Reward: `mcqa`, or `geo3k` for mathematics.

    A row is checked when it is due; raises then what `gym_rows` raises. Clips are read by the media service, below its
    `media.sources.roots`.
    """
    table = open_table(path, split)
    convert = partial(_convert, prompt)
    return SetRows(table, shuffled(len(table), seed), prefix=f"gym-video/{split}", convert=convert)


def _convert(prompt: str, raw: Mapping[str, Any], prompt_id: str) -> PromptRow:
    parts = parts_of(raw)
    kwargs = _template_kwargs(raw["responses_create_params"].get("metadata") or {})
    extra = {name: value for name, value in raw.items() if name not in _OWN}
    return PromptRow(
        prompt_id=prompt_id,
        text=prompt.replace("{}", "\n".join(parts.text)),
        images=tuple(local_path(source).read_bytes() for source in parts.media[MediaKind.IMAGE]),
        answer=str(raw["expected_answer"]),
        task="gym-video",
        extra={**extra, "system": "\n".join(parts.system), "chat_template_kwargs": kwargs},
        clips=tuple(clips_of(parts)),
        sounds=tuple(file_url(source) for source in parts.media[MediaKind.AUDIO]),
    )


def _template_kwargs(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """chat_template_kwargs, or those in extra_body; objects, or JSON strings of objects. Raises INVALID_REQUEST."""
    body = _object(metadata.get("extra_body"), "extra_body")
    return {
        **_object(body.get("chat_template_kwargs"), "extra_body.chat_template_kwargs"),
        **{name: value for name, value in body.items() if name == "enable_thinking"},
        **_object(metadata.get("chat_template_kwargs"), "chat_template_kwargs"),
    }


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise invalid(f"metadata.{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid(f"metadata.{name} is no object")
    return found
