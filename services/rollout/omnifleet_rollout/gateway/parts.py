"""Messages and their parts -> what chat templates take, with every picture, clip and sound by digest."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.errors import Reason, invalid
from omnifleet.types import Digest, MediaKind, MediaRef

PutMedia = Callable[[str, MediaKind, str], Awaitable[MediaRef]]
"""(URL: data, http, file or path; kind; run) -> reference, by the media service, which decides what it takes."""

_TEXT = ("text", "input_text", "output_text", "refusal")
_SOURCES = {
    # type of a part -> (kind, the fields that may hold its source; one of them must)
    "image_url": (MediaKind.IMAGE, ("image_url",)),
    "input_image": (MediaKind.IMAGE, ("image_url",)),
    "video_url": (MediaKind.VIDEO, ("video_url",)),
    "input_video": (MediaKind.VIDEO, ("video_url", "video")),
    "audio_url": (MediaKind.AUDIO, ("audio_url",)),
    "input_audio": (MediaKind.AUDIO, ("input_audio",)),
}
_SCHEME = "media://"
_FORMAT = re.compile(r"[a-z0-9][a-z0-9.+-]{0,31}")
_AT_ONCE = 8
TRAINING_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
"""What replies carry for training and clients send back with the message; no template sees them."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A message as templates take it. media: in the order of its parts."""

    body: dict[str, Any]
    media: tuple[MediaRef, ...] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    kind: MediaKind
    url: str


async def plain_messages(messages: Any, run: str, put_media: PutMedia) -> list[Plain]:
    """Every message in plain form; each distinct source goes into the media service once.

    Raises INVALID_REQUEST for malformed messages, INVALID_MEDIA and what else the media service says.
    """
    parsed = [_message(message, i) for i, message in enumerate(_list(messages, "messages"))]
    refs = await _resolve({source for _, sources in parsed for source in sources}, run, put_media)
    return [Plain(body, tuple(refs[source] for source in sources)) for body, sources in parsed]


async def _resolve(sources: set[_Source], run: str, put_media: PutMedia) -> dict[_Source, MediaRef]:
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(source: _Source) -> tuple[_Source, MediaRef]:
        if source.url.startswith(_SCHEME):
            return source, MediaRef(source.kind, _digest(source.url))
        async with room:
            return source, await put_media(source.url, source.kind, run)

    tasks = [asyncio.ensure_future(one(source)) for source in sources]
    try:
        return dict(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _digest(url: str) -> Digest:
    digest = url.removeprefix(_SCHEME)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise invalid(f"{url[:80]!r} is not media:// and 64 hex characters", reason=Reason.INVALID_MEDIA)
    return Digest(digest)


def _message(message: Any, index: int) -> tuple[dict[str, Any], list[_Source]]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid(f"{where} must be an object with a role")
    body = {key: value for key, value in message.items() if key not in TRAINING_FIELDS and value is not None}
    body["role"] = "system" if body["role"] == "developer" else body["role"]
    if isinstance(body.get("tool_calls"), list):
        body["tool_calls"] = [_tool_call(call, where) for call in body["tool_calls"]]
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**body, "content": content or ""}, []
    parts = [
        _part(part, f"{where}.content[{k}]") for k, part in enumerate(_list(content, f"{where}.content"))
    ]
    sources = [source for _, source in parts if source is not None]
    return {**body, "content": [plain for plain, _ in parts]}, sources


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call as templates take it: arguments are an object wherever the string is one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.tool_calls: each needs a function with a name")
    arguments = function.get("arguments", "")
    try:
        value = (
            json.loads(arguments, parse_constant=_no_constant) if isinstance(arguments, str) else arguments
        )
    except ValueError:
        value = arguments
    return {**call, "function": {**function, "arguments": value if isinstance(value, dict) else arguments}}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _part(part: Any, where: str) -> tuple[dict[str, Any], _Source | None]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT and isinstance(text := part.get("text", part.get("refusal")), str):
        return {"type": "text", "text": text}, None
    if kind not in _SOURCES:
        raise invalid(f"{where} of type {kind!r}: allowed are {', '.join((*_TEXT[:1], *_SOURCES))}")
    media, fields = _SOURCES[kind]
    given = [field for field in fields if part.get(field) is not None]
    if len(given) != 1:
        raise invalid(f"{where} of type {kind!r} takes exactly one of {', '.join(fields)}")
    if part.get("detail", "auto") not in ("auto", None):
        raise invalid(f"{where}.detail: the model's own processor decides the resolution; leave it out")
    url = _url(part[given[0]], f"{where}.{given[0]}")
    return {"type": str(media)}, _Source(media, url)


def _url(source: Any, where: str) -> str:
    if isinstance(source, Mapping):
        if source.get("detail", "auto") not in ("auto", None):
            raise invalid(f"{where}.detail: the model's own processor decides the resolution; leave it out")
        if isinstance(source.get("data"), str):
            return _inline_sound(source["data"], source.get("format") or "wav", where)
        source = source.get("url")
    if not isinstance(source, str) or not source.strip():
        raise invalid(
            f"{where} must hold a URL: media://DIGEST, data:, http(s):", reason=Reason.INVALID_MEDIA
        )
    return source


def _inline_sound(data: str, format: Any, where: str) -> str:
    """A data URL. What the bytes are is for the media service to see; the name of the format must be one."""
    if not isinstance(format, str) or not _FORMAT.fullmatch(format):
        raise invalid(
            f"{where}.format {str(format)[:40]!r} is no format: wav, mp3, flac, ogg, ...",
            reason=Reason.INVALID_MEDIA,
        )
    return f"data:audio/{format};base64,{data}"


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise invalid(f"{name} must be a list with at least one item")
    return value


def plain_reply(content: str, calls: Sequence[tuple[str, str]]) -> Plain:
    """A sampled reply in the form in which its client will send it back. calls: (name, arguments as sampled)."""
    body: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        functions = ({"function": {"name": name, "arguments": arguments}} for name, arguments in calls)
        body["tool_calls"] = [_tool_call(call, "the reply") for call in functions]
    return Plain(body)
