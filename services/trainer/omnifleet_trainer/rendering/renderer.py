"""Rows to prompts. Each picture is put once; the trainer expands the prompt itself and knows its hash beforehand."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from omnifleet.address import source_digest, token_digest
from omnifleet.client.media import Segment
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.processor import ImageProcessorSpec, ProcessorSpec
from omnifleet.prompt import NO_BRACKETS, Brackets, expand_placeholders
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.rendering.template import ChatTemplate

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

_KNOWN_PICTURES = 65_536


class Pictures(Protocol):
    """What the renderer asks of the media service; `omnifleet.client.media.MediaClient` is one."""

    async def put_image(self, data: bytes, run: str) -> MediaRef:
        """Store a picture by content."""
        ...

    async def segment(self, ref: MediaRef, spec: ImageProcessorSpec, run: str) -> Segment:
        """Its model-ready tensors."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, ready to send and to train on.

    token_ids: [T] with one placeholder a picture. expanded: [T'] with one a feature, as the model sees it.
    prompt_hash: `token_digest(expanded)`. segments: model-ready tensors of each picture, in order.
    """

    token_ids: list[int]
    expanded: list[int]
    prompt_hash: Digest
    media: tuple[MediaRef, ...]
    segments: tuple[Segment, ...]
    opened: str


class Renderer:
    """Renders rows for one checkpoint. Safe to call from many tasks at once."""

    def __init__(
        self,
        template: ChatTemplate,
        media: Pictures,
        processor: ImageProcessorSpec,
        *,
        placeholder: int,
        run: str,
        max_prompt_tokens: int,
        clips: ProcessorSpec | None = None,
        sounds: ProcessorSpec | None = None,
        brackets: Brackets = NO_BRACKETS,
    ) -> None:
        """placeholder: the checkpoint's image token. max_prompt_tokens: longest expanded prompt. clips, sounds: processors
        of those, None if the model takes none.

        brackets: tokens that the family writes around a picture's features.
        """
        self._brackets = brackets
        self._template = template
        self._media = media
        self._processor = processor
        self._processors = {MediaKind.IMAGE: processor, MediaKind.VIDEO: clips, MediaKind.AUDIO: sounds}
        self._placeholder = placeholder
        self._run = run
        self._max_prompt_tokens = max_prompt_tokens
        self._opened = template.opened()
        self._refs: OrderedDict[Digest, MediaRef] = OrderedDict()

    @property
    def opened(self) -> str:
        """What the template opens for every reply; scorers need to know it."""
        return self._opened

    async def render(self, row: PromptRow) -> RenderedPrompt:
        """Place the row's pictures and tokenise it.

        Raises PROMPT_TOO_LONG (media is never cut to fit), INVALID_MEDIA, and what the media service raises.
        """
        if row.clips or row.sounds:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"prompt {row.prompt_id!r} has clips or sounds, which only environments take",
                knob="data.train.environment",
            )
        media = await self.place(row.images)
        segments = await asyncio.gather(
            *(self._media.segment(ref, self._processor, self._run) for ref in media)
        )
        token_ids = self._template.render(row.text, len(media))
        counts = [segment.token_count for segment in segments]
        expanded = expand_placeholders(token_ids, self._placeholder, counts, self._brackets)
        if len(expanded) > self._max_prompt_tokens:
            raise invalid(
                f"prompt {row.prompt_id!r} has {len(expanded)} tokens, at most {self._max_prompt_tokens}",
                knob="data.max_prompt_tokens",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return RenderedPrompt(
            token_ids, expanded, token_digest(expanded), media, tuple(segments), self._opened
        )

    async def place(self, pictures: Sequence[bytes]) -> tuple[MediaRef, ...]:
        """References of pictures in the media service, each put once a process."""
        return tuple([await self._place(data) for data in pictures])

    async def segments(self, media: Sequence[MediaRef]) -> tuple[Segment, ...]:
        """Model-ready tensors of media that are there already. Raises UNSUPPORTED for a kind that the model does not take."""
        return tuple(await asyncio.gather(*(self._segment(ref) for ref in media)))

    def check_kind(self, kind: MediaKind) -> ProcessorSpec:
        """The processor of a kind of media. Raises UNSUPPORTED if the model is trained on none of it."""
        processor = self._processors.get(kind)
        if processor is None:
            raise OmnifleetError(Reason.UNSUPPORTED, f"the model is trained on no {kind}", knob="model.path")
        return processor

    async def _segment(self, ref: MediaRef) -> Segment:
        return await self._media.segment(ref, self.check_kind(ref.kind), self._run)

    def forget(self, row: PromptRow) -> None:
        """The media service lost something: put this row's pictures again next time."""
        for data in row.images:
            self._refs.pop(source_digest(data), None)

    async def _place(self, data: bytes) -> MediaRef:
        source = source_digest(data)
        ref = self._refs.get(source)
        if ref is None:
            ref = self._refs[source] = await self._media.put_image(data, self._run)
            while len(self._refs) > _KNOWN_PICTURES:
                self._refs.popitem(last=False)
        return ref
