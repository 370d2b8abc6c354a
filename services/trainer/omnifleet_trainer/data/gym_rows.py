"""Rows of NeMo Gym's video GRPO, as JSON lines: what a row must be before a run, and what becomes of its parts in one.

{responses_create_params: {input: [{role, content}], metadata?}, agent_ref: {type, name}, expected_answer, options?,
grading_mode?, …}
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import MediaKind

MCQA_AGENT, MATH_AGENT = "mcqa_simple_agent", "math_with_judge_simple_agent"
LETTERS = "ABCDEFGHIJ"
TEXT = ("input_text", "text")
MEDIA = {
    "input_video": MediaKind.VIDEO,
    "video": MediaKind.VIDEO,
    "video_url": MediaKind.VIDEO,
    "input_image": MediaKind.IMAGE,
    "image": MediaKind.IMAGE,
    "image_url": MediaKind.IMAGE,
    "input_audio": MediaKind.AUDIO,
    "audio": MediaKind.AUDIO,
    "audio_url": MediaKind.AUDIO,
}
_FIELDS = ("video_url", "video", "image_url", "image", "audio_url", "audio", "input_audio", "url")
_FRAMES_MAGIC = b"NEMO_RL_CACHED_VIDEO_FRAMES_V1\n"
_FRAMES_MIME = "video/x-nemo-rl-cached-frames"


@dataclass(slots=True)
class Parts:
    """A row's input by kind. Media are paths, or data URLs."""

    system: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    media: dict[MediaKind, list[str]] = field(default_factory=lambda: {kind: [] for kind in MediaKind})
    frames: list[tuple[str, str]] = field(default_factory=list)
    """(source, path) of cached frames of a clip."""


def parts_of(row: Mapping[str, Any]) -> Parts:
    """Sort a row's input. Raises INVALID_REQUEST for a part of unknown type, INVALID_MEDIA for one without a source."""
    found = Parts()
    params = row.get("responses_create_params")
    messages = params.get("input") if isinstance(params, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise invalid("responses_create_params.input must be a list of messages")
    for message in messages:
        if not isinstance(message, Mapping):
            raise invalid("a message of the input is no object")
        content = message.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise invalid("a message's content is a text or a list of parts")
        for part in parts:
            _sort(part, found, found.system if message.get("role") in ("system", "developer") else found.text)
    return found


def _sort(part: Any, found: Parts, text: list[str]) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT and isinstance(part.get("text"), str):
        text.append(part["text"])
        return
    if kind not in MEDIA:
        raise invalid(f"a part of type {kind!r}: allowed are {', '.join((*TEXT[:1], *MEDIA))}")
    source = next((part[name] for name in _FIELDS if part.get(name)), "")
    if isinstance(source, Mapping):
        data = f"data:audio/{source.get('format') or 'wav'};base64,{source.get('data')}"
        source = source.get("url") or (data if source.get("data") else "")
    if not isinstance(source, str) or not source:
        raise invalid(f"a part of type {kind} names no source", reason=Reason.INVALID_MEDIA)
    if part.get("_is_video_frame"):
        found.frames.append((str(part.get("_video_source") or ""), source))
        return
    found.media[MEDIA[kind]].append(source)


def clips_of(parts: Parts, *, several: bool = True) -> list[str]:
    """The clips to place: file:// URLs, or the manifest of cached frames as a data URL.

    Raises INVALID_MEDIA where there is none, several but one is allowed, or frames are mixed with pictures, clips or each other.
    """
    clips = parts.media[MediaKind.VIDEO]
    if not parts.frames:
        if not clips or (len(clips) > 1 and not several):
            raise _bad(f"a row needs {'a clip' if several else 'exactly one clip'}, it has {len(clips)}")
        return [file_url(clip) for clip in clips]
    if clips or parts.media[MediaKind.IMAGE]:
        raise _bad("cached frames of a clip are mixed with clips or pictures")
    sources = {source for source, _ in parts.frames}
    if len(sources) != 1 or "" in sources:
        raise _bad(f"cached frames come from one named source, not from {sorted(sources)}")
    return [_manifest([local_path(path) for _, path in parts.frames])]


def file_url(source: str) -> str:
    """A local source as a file:// URL; data URLs and media:// stay. Raises as `local_path`."""
    return source if source.startswith(("data:", "media://")) else f"file://{local_path(source)}"


def local_path(source: str, roots: Sequence[Path] = ()) -> Path:
    """An existing local file, file:// or an absolute path, links resolved; below one of `roots` if there are any.

    Raises INVALID_MEDIA (relative, other scheme), NOT_FOUND, FORBIDDEN (unreadable, or outside the roots).
    """
    scheme, found, rest = source.partition("://")
    if found and scheme != "file":
        raise _bad(f"{source!r}: only local files are allowed, file:// or an absolute path")
    path = Path(rest if found else source)
    if not path.is_absolute():
        raise _bad(f"{source!r} is not absolute")
    if not path.is_file():
        raise invalid(f"{path} is no file", reason=Reason.NOT_FOUND)
    resolved = path.resolve()
    if not os.access(resolved, os.R_OK):
        raise OmnifleetError(Reason.FORBIDDEN, f"{path} cannot be read")
    if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        raise OmnifleetError(
            Reason.FORBIDDEN, f"{path} is outside the allowed roots", knob="media.sources.roots"
        )
    return resolved


def _manifest(paths: Sequence[Path]) -> str:
    """The reference's frame manifest: ordered files, a second a frame."""
    count = len(paths)
    metadata = {
        "fps": 1.0,
        "duration": count,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "cached_png_sequence",
        "do_sample_frames": False,
    }
    body = json.dumps(
        {"frame_paths": [str(path) for path in paths], "metadata": metadata}, separators=(",", ":")
    )
    return f"data:{_FRAMES_MIME};base64," + base64.b64encode(_FRAMES_MAGIC + body.encode()).decode()


def check_row(row: Mapping[str, Any], *, roots: Sequence[Path] = (), several: bool = False) -> Parts:
    """All that can be told without decoding; returns the parts. Raises OmnifleetError that says what is wrong.

    several: rows may have more than the reference's one clip.
    """
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise invalid("agent_ref.name is empty")
    answer = row.get("expected_answer")
    if not isinstance(answer, str) or not answer.strip():
        raise invalid("expected_answer is no text, or an empty one")
    if name == MCQA_AGENT:
        _check_options(row.get("options"), answer)
    parts = parts_of(row)
    clips_of(parts, several=several)
    for source in _local_sources(parts):
        local_path(source, roots)
    return parts


def _check_options(options: Any, answer: str) -> None:
    if answer not in LETTERS or len(answer) != 1:
        raise invalid(f"expected_answer {answer!r} is none of A to J")
    if not isinstance(options, list) or len(options) < 2:
        raise invalid("a multiple-choice row needs at least two options")
    letters = []
    for option in options:
        ((letter, text),) = option.items() if isinstance(option, dict) and len(option) == 1 else (("", ""),)
        if letter not in set(LETTERS) or not isinstance(text, str) or not text.strip():
            raise invalid(f"option {option!r} is not one letter A to J with a text")
        letters.append(letter)
    if len(set(letters)) != len(letters):
        raise invalid(f"options {letters} are not unique")
    if answer not in letters:
        raise invalid(f"expected_answer {answer} is none of the options {letters}")


def _local_sources(parts: Parts) -> Iterator[str]:
    for sources in (*parts.media.values(), [path for _, path in parts.frames]):
        yield from (source for source in sources if not source.startswith(("data:", "media://")))


def _bad(message: str) -> OmnifleetError:
    return invalid(message, reason=Reason.INVALID_MEDIA)
