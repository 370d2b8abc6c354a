"""Template <-> tokens: chat messages -> exact token ids by the checkpoint's own template. Jinja and tokenizer only.

A conversation that goes on is never tokenised again: `extend` keeps the known ids and adds only what the template puts
after the last known reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnifleet.client.rollout import Rendered
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.processor import picture_brackets
from omnifleet.prompt import NO_BRACKETS, Brackets
from omnifleet.sounds import sound_brackets
from omnifleet.types import MediaKind, MediaRef
from omnifleet_rollout.gateway.parts import Plain
from omnifleet_rollout.gateway.turns import Prefix

_OWN_KWARGS = frozenset(
    {"conversation", "tokenize", "chat_template", "return_tensors", "return_dict", "tools"}
)
_PLACEHOLDERS = {
    MediaKind.IMAGE: ("image_token_id", "image_token_index", "img_context_token_id"),
    MediaKind.VIDEO: ("video_token_id", "video_token_index", "video_context_token_id"),
    MediaKind.AUDIO: ("audio_token_id", "audio_token_index", "sound_context_token_id"),
}
_REPLY = "omnifleet:reply:7d1f"  # stands for a reply while a template shows what comes after it


class NoContinuation(OmnifleetError):
    """A reply that nothing can follow token by token: its conversation can only be rendered anew, from its text."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """One checkpoint's tokenizer. placeholders: kind -> id of its placeholder. eos: ids that end a reply.

    brackets: placeholder -> what the engine puts before and after its features, where the template writes none.
    """

    tokenizer: Any
    placeholders: Mapping[MediaKind, int]
    eos: frozenset[int]
    special: frozenset[int] = field(default_factory=frozenset)
    brackets: Mapping[int, Brackets] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)  # of tokens, once each: at most the vocabulary

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
        placeholders = _placeholders(config)
        special = frozenset(tokenizer.all_special_ids)
        return Renderer(tokenizer, placeholders, frozenset(eos), special, _brackets(path, placeholders))

    # ------------------------------------------------------------------ tokens -> text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """One token as it is, special or not."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text; special tokens in it are recognised, none is added."""
        return [int(id) for id in self.tokenizer.encode(text, add_special_tokens=False)]

    # ------------------------------------------------------------------ messages -> tokens

    def render(self, messages: Sequence[Plain], *, tools: Any = None, kwargs: Mapping[str, Any]) -> Rendered:
        """Unexpanded prompt tokens and media in order.

        Raises INVALID_REQUEST for messages or arguments that the template refuses, UNSUPPORTED for media that the
        model does not take.
        """
        text = self._apply([message.body for message in messages], tools, kwargs)
        media = [ref for message in messages for ref in message.media]
        return self._checked(self.encode(text), media, text)

    def extend(
        self, prefix: Prefix, messages: Sequence[Plain], *, tools: Any = None, kwargs: Mapping[str, Any]
    ) -> Rendered:
        """Like `render`, but messages[:prefix.end] are exactly `prefix.token_ids`; only what follows is tokenised.

        Raises NoContinuation if the template, or a placeholder that the model sampled at the end, does not let it.
        """
        bodies = [message.body for message in messages]
        bodies[prefix.end - 1] = {"role": "assistant", "content": _REPLY}
        _, found, text = self._apply(bodies, tools, kwargs).partition(_REPLY)
        if not found or _REPLY in text:
            raise NoContinuation(
                Reason.UNSUPPORTED,
                "the chat template does not show a reply once, as it is; this conversation "
                "can only be rendered anew",
                knob="on_history_change: rerender",
            )
        last = prefix.token_ids[-1]
        if last in self.placeholders.values():
            raise NoContinuation(
                Reason.INVALID_REQUEST,
                "the last reply ended in a media placeholder that the model sampled: it cannot be fed back without a "
                "picture, so nothing can follow it",
                knob="on_history_change: rerender, or rollout.engine.media_tokens: ban",
            )
        if last in self.eos | self.special:
            text = text.removeprefix(self.token_text(last))  # the reply ended itself, as the template would
        media = [*prefix.media, *(ref for message in messages[prefix.end :] for ref in message.media)]
        return self._checked([*prefix.token_ids, *self.encode(text)], media, text)

    def unexpanded(self, token_ids: Sequence[int]) -> list[int]:
        """Expanded ids with one placeholder a media item: a run of one placeholder is one item, its brackets are no tokens
        of the prompt. Words that stand within a clip stay."""
        marks = set(self.placeholders.values())
        previous: list[int | None] = [None, *token_ids[:-1]]
        ids = [id for id, before in zip(token_ids, previous, strict=True) if id not in marks or id != before]
        for mark, (before, after) in self.brackets.items():
            ids = _replaced(ids, [*before, mark, *after], mark)
        return ids

    def _apply(self, messages: list[dict[str, Any]], tools: Any, kwargs: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        if refused := sorted(_OWN_KWARGS & kwargs.keys()):
            raise invalid(f"template arguments {', '.join(refused)} are not the caller's to set")
        kwargs = {"add_generation_prompt": True, **kwargs}
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **kwargs)
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise invalid(f"the chat template refuses the messages: {error}") from error

    def _checked(self, token_ids: list[int], media: Sequence[MediaRef], text: str) -> Rendered:
        """One placeholder a media item, of its kind, in order: the engine would fail deep inside, or mix them up."""
        missing = {ref.kind for ref in media} - self.placeholders.keys()
        if missing:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"the model takes no {', '.join(sorted(missing))}", knob="model.path"
            )
        marks = set(self.placeholders.values())
        found = [id for id in token_ids if id in marks]
        if found != [self.placeholders[ref.kind] for ref in media]:
            raise invalid(
                f"the rendered prompt has {len(found)} media placeholders for {len(media)} media items, or in another "
                "order; messages must not contain a placeholder as text, and the model's template must take the media"
            )
        return Rendered(token_ids, tuple(media), text)


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
        if self._task.done():
            return self._task.result()
        try:
            return await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        except TimeoutError:
            raise OmnifleetError(
                Reason.UNAVAILABLE, "the tokenizer is still loading", retryable=True
            ) from None


def _placeholders(config: Mapping[str, Any]) -> dict[MediaKind, int]:
    found = {
        kind: next((config[name] for name in names if isinstance(config.get(name), int)), None)
        for kind, names in _PLACEHOLDERS.items()
    }
    return {kind: id for kind, id in found.items() if id is not None}


def _brackets(path: Path, placeholders: Mapping[MediaKind, int]) -> dict[int, Brackets]:
    found: dict[int, Brackets] = {}
    if MediaKind.IMAGE in placeholders:
        found[placeholders[MediaKind.IMAGE]] = picture_brackets(path)
    if MediaKind.AUDIO in placeholders:
        with suppress(OmnifleetError):  # a family whose template writes its own
            found[placeholders[MediaKind.AUDIO]] = sound_brackets(path)
    return {mark: pair for mark, pair in found.items() if pair != NO_BRACKETS}


def _replaced(ids: list[int], run: list[int], mark: int) -> list[int]:
    """`ids` with each `run` of them as `mark` alone."""
    out: list[int] = []
    for id in ids:
        out.append(id)
        if id == run[-1] and out[-len(run) :] == run:
            out[-len(run) :] = [mark]
    return out


def _read_json(path: Path) -> dict[str, Any]:
    body = json.loads(path.read_text())
    if not isinstance(body, dict):
        raise ValueError(f"{path} is not a JSON object")
    return body
