"""Chat messages -> exact token ids by the checkpoint's own template, and tokens -> text. Jinja and tokenizer only."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.client.rollout import Rendered
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import Digest, MediaKind, MediaRef

PutImage = Callable[[bytes, str], Awaitable[MediaRef]]
"""(bytes of a picture's file, run) -> its reference, by the media service."""

_DIGEST = re.compile(r"media://([0-9a-f]{64})")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_OWN_KWARGS = frozenset(
    {"conversation", "tokenize", "chat_template", "return_tensors", "return_dict", "tools"}
)


@dataclass(frozen=True, slots=True)
class Renderer:
    """One checkpoint's tokenizer. image_token: id of the placeholder, None for a text model. eos: ids that end a reply."""

    tokenizer: Any
    image_token: int | None
    eos: frozenset[int]

    @staticmethod
    def load(path: Path) -> Renderer:
        """Read a checkpoint folder; blocks. Raises MODEL_MISSING or UNSUPPORTED (no chat template)."""
        from transformers import AutoTokenizer

        try:
            config = _read_json(path / "config.json")
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise OmnifleetError(
                Reason.MODEL_MISSING, f"no tokenizer can be loaded from {path}: {error}", knob="model.path"
            ) from error
        if not tokenizer.chat_template:
            raise OmnifleetError(Reason.UNSUPPORTED, f"{path} has no chat template", knob="model.path")
        generation = path / "generation_config.json"
        ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
        eos = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        return Renderer(tokenizer, config.get("image_token_id"), frozenset(eos))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def render(
        self,
        messages: Any,
        run: str,
        put_image: PutImage,
        *,
        tools: Any = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Unexpanded prompt tokens and media in order. Data URLs go into the media service.

        Raises INVALID_REQUEST for malformed messages or template arguments, INVALID_MEDIA for any other source.
        """
        media: list[MediaRef] = []
        plain = [
            await _message(message, i, run, put_image, media) for i, message in enumerate(_list(messages))
        ]
        kwargs = dict(template_kwargs or {})
        if refused := sorted(_OWN_KWARGS & kwargs.keys()):
            raise invalid(f"template arguments {', '.join(refused)} are not the caller's to set")
        text = self._apply(plain, tools, {"add_generation_prompt": True, **kwargs})
        token_ids = [int(id) for id in self.tokenizer.encode(text, add_special_tokens=False)]
        found = token_ids.count(self.image_token) if self.image_token is not None else 0
        if found != len(media):
            raise invalid(
                f"the rendered prompt has {found} picture placeholders for {len(media)} pictures; "
                "messages must not contain the placeholder as text, and the model's template must take pictures"
            )
        return Rendered(token_ids, tuple(media), text)

    def _apply(self, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **kwargs)
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise invalid(f"the chat template refuses the messages: {error}") from error


class RendererLoader:
    """Loads a renderer in a thread, once; requests that need it wait for it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._task: asyncio.Task[Renderer] | None = None

    def start(self) -> None:
        """Begin to load."""
        if self._path is not None:
            self._task = asyncio.create_task(asyncio.to_thread(Renderer.load, self._path))

    @property
    def now(self) -> Renderer | None:
        """The renderer if it is there."""
        task = self._task
        loaded = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and loaded else None

    @property
    def settled(self) -> bool:
        """True once there is nothing more to wait for."""
        return self._task is None or self._task.done()

    async def get(self, timeout_s: float) -> Renderer:
        """The renderer. Raises MODEL_MISSING if there is none, UNAVAILABLE if it is not there in time."""
        if self._task is None:
            raise OmnifleetError(
                Reason.MODEL_MISSING,
                "this gateway knows no checkpoint, so it cannot render chat or text; send token prompts",
                knob="model.path",
            )
        try:
            return await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        except TimeoutError:
            raise OmnifleetError(
                Reason.UNAVAILABLE, "the tokenizer is still loading", retryable=True
            ) from None


async def _message(
    message: Any, index: int, run: str, put_image: PutImage, media: list[MediaRef]
) -> dict[str, Any]:
    """The message as templates take it; appends its media."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise invalid(f"messages[{index}] must be an object with a role")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    parts = [
        await _part(part, f"messages[{index}].content[{k}]", run, put_image, media)
        for k, part in enumerate(_list(content, f"messages[{index}].content"))
    ]
    return {**message, "content": parts}


async def _part(
    part: Any, where: str, run: str, put_image: PutImage, media: list[MediaRef]
) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        source = part.get("image_url")
        url = source.get("url") if isinstance(source, Mapping) else source
        media.append(await _picture(url, where, run, put_image))
        return {"type": "image"}
    raise invalid(f"{where} of type {kind!r}: allowed are text (with text) and image_url")


async def _picture(url: Any, where: str, run: str, put_image: PutImage) -> MediaRef:
    if not isinstance(url, str):
        raise invalid(f"{where}.image_url.url must be a string", reason=Reason.INVALID_MEDIA)
    if known := _DIGEST.fullmatch(url):
        return MediaRef(MediaKind.IMAGE, Digest(known[1]))
    if header := _DATA_URL.match(url):
        try:
            return await put_image(base64.b64decode(url[header.end() :], validate=True), run)
        except binascii.Error as error:
            raise invalid(
                f"{where}: the data URL is not base64: {error}", reason=Reason.INVALID_MEDIA
            ) from error
    raise invalid(
        f"{where}: {url[:40]!r} is not allowed here; send media://DIGEST or a data:image/...;base64 URL, "
        "or put the picture into the media service first",
        reason=Reason.INVALID_MEDIA,
    )


def _list(value: Any, name: str = "messages") -> list[Any]:
    if not isinstance(value, list) or not value:
        raise invalid(f"{name} must be a list with at least one item")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    body = json.loads(path.read_text())
    if not isinstance(body, dict):
        raise ValueError(f"{path} is not a JSON object")
    return body
