"""Media of a prompt on their way into vLLM: model-ready segments with explicit places, never its own processor.

So nothing is decoded, resampled or expanded twice, and vLLM's caches are keyed by content: the uuid of an item is its
segment's key, the digest of (media digest, processor fingerprint), and the fingerprint covers the processor's class, its
settings, its library and the sampling contract. Encoder outputs depend on trained weights too; that cache is emptied by
each refit that changes what they depend on, so the uuid needs no epoch and pixels stay cached across versions.

How vLLM tells that it lacks a picture, and what becomes of each sign here:

1. its front end: "Cache miss ... data is not provided", an HTTP 400 or an exception in process. It comes from vLLM's own
   rendering of a uuid without data. We render ourselves and never send one: an item is left out only where the front end's
   own cache, asked in the same step, says that the engine process has it.
2. `finish_reason="error"` without a token: the engine process has dropped what its front end thought it had. The request is
   sent once more, with data (`VllmEngine.generate`).
3. an assertion in the engine process, in releases without sign 2: there, every request carries its data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omnifleet.client.media import MediaClient, Segment
from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.processor import (
    ProcessorSpec,
    image_token_id,
    picture_brackets,
    read_image_processor,
    read_video_processor,
    video_token_id,
)
from omnifleet.prompt import Brackets, lay_out
from omnifleet.sounds import read_sound_config, sound_brackets, sound_token_id
from omnifleet.types import MediaKind, MediaRef
from omnifleet_rollout.engine import vllm_nemotron as nemotron
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.checkpoint import read_config
from omnifleet_rollout.engine.port import EnginePrompt
from omnifleet_rollout.engine.vllm_sounds import Sounds

CLIPS = (
    frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"})
    | seams.LANGUAGE_IN_ENCODER
)
"""Architectures whose clips we can place: one run of equal placeholders, or Nemotron's."""

_KNOBS = {
    MediaKind.IMAGE: "rollout.engine.images_per_prompt",
    MediaKind.VIDEO: "rollout.engine.videos_per_prompt",
    MediaKind.AUDIO: "rollout.engine.sounds_per_prompt",
}
_SENT = {
    MediaKind.IMAGE: "pictures_sent",
    MediaKind.VIDEO: "clips_sent",
    MediaKind.AUDIO: "sounds_sent",
}


@dataclass(frozen=True, slots=True)
class Modality:
    """How a model takes one kind of media. token: its placeholder. limit: most items in one prompt.

    brackets: tokens around each item's features, if they are not those of pictures.
    """

    spec: ProcessorSpec
    token: int
    limit: int
    knob: str
    brackets: Brackets | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of a prompt: where its encoder output goes within the expanded ids."""

    kind: MediaKind
    segment: Segment
    offset: int
    length: int


class PromptMedia:
    """Turns token prompts with media references into what `EngineRequest` carries, and that into vLLM's input.

    find_media: address of the media service, asked at the first item.
    """

    def __init__(
        self,
        model: Path,
        architecture: str,
        engine: EngineConfig,
        *,
        find_media: Callable[[], Awaitable[str]],
        secret: str,
    ) -> None:
        self._architecture, self._limit = architecture, engine.max_model_len
        self._find_media, self._secret = find_media, secret
        self._kinds = _modalities(model, architecture, engine)
        self._brackets = picture_brackets(model)
        self._nemotron = architecture in seams.LANGUAGE_IN_ENCODER
        self._sounds = _sounds(model, self._kinds, engine)
        self._model = model
        self._tokenizer: Any = None
        self.tokens = _placeholders(model)
        """Placeholder tokens of the model, also those of kinds that are not served."""
        self._client: MediaClient | None = None
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self.counters: dict[str, float] = dict.fromkeys([*_SENT.values(), "media_resent"], 0.0)

    @property
    def takes_any(self) -> bool:
        """Whether the model takes media at all."""
        return bool(self._kinds)

    @property
    def takes_sounds(self) -> bool:
        """Whether prompts may have sounds."""
        return self._sounds is not None

    async def prepare(self, token_ids: Sequence[int], media: Sequence[MediaRef], run: str) -> EnginePrompt:
        """Expand placeholders and find the media. See `Engine.prepare`."""
        self._check(media)
        segments = [await self._segment(ref, run) for ref in media]
        ids, ranges = self._lay_out(token_ids, media, segments)
        if len(ids) >= self._limit:
            raise invalid(
                f"the expanded prompt has {len(ids)} tokens, max_model_len is {self._limit}",
                knob="rollout.engine.max_model_len",
                reason=Reason.PROMPT_TOO_LONG,
            )
        items = tuple(
            Item(ref.kind, segment, offset, length)
            for ref, segment, (offset, length) in zip(media, segments, ranges, strict=True)
        )
        return EnginePrompt(ids, items or None, tuple(str(segment.fingerprint) for segment in segments))

    def _lay_out(
        self, token_ids: Sequence[int], media: Sequence[MediaRef], segments: Sequence[Segment]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Expanded ids and (offset, length) of each item. A Nemotron clip has words of its own between its features, a sound
        other tokens around them than a picture."""
        wanted = [(self._kinds[r.kind].token, s.token_count) for r, s in zip(media, segments, strict=True)]
        if not (self._nemotron and any(ref.kind is not MediaKind.IMAGE for ref in media)):
            return lay_out(token_ids, wanted, self.tokens, self._brackets)
        lay_out(token_ids, wanted, self.tokens)  # the same refusals
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        for token in token_ids:
            if token not in self.tokens:
                ids.append(token)
                continue
            piece, first, length = self._piece(media[len(ranges)], segments[len(ranges)])
            ranges.append((len(ids) + first, length))
            ids += piece
        return ids, ranges

    def _piece(self, ref: MediaRef, segment: Segment) -> tuple[list[int], int, int]:
        """What stands for one item in a Nemotron prompt, and which part of it the encoder embeds: first, length."""
        token = self._kinds[ref.kind].token
        if ref.kind is not MediaKind.VIDEO:
            before, after = self._kinds[ref.kind].brackets or self._brackets
            return [*before, *[token] * segment.token_count, *after], len(before), segment.token_count
        ids = nemotron.clip_ids(
            segment.times_s,
            segment.token_count,
            int(self._kinds[ref.kind].spec.config.get("temporal_patch_size") or 2),
            self._encode,
            image_token_id(self._model),
            self._brackets,
        )
        return ids, 0, len(ids)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _check(self, media: Sequence[MediaRef]) -> None:
        for kind in {ref.kind for ref in media}:
            modality = self._kinds.get(kind)
            if modality is None:
                message = f"{self._architecture} takes no {kind} here"
                raise OmnifleetError(Reason.UNSUPPORTED, message, knob=_KNOBS[kind])
            count = sum(ref.kind is kind for ref in media)
            if count > modality.limit:
                message = f"{count} {kind} items in one prompt, at most {modality.limit} are allowed"
                raise invalid(message, knob=modality.knob)

    async def _segment(self, ref: MediaRef, run: str) -> Segment:
        media = await self._media()
        if ref.kind is MediaKind.AUDIO and self._sounds is not None:
            return await self._sounds.segment(media, ref)
        segment = await media.segment(ref, self._kinds[ref.kind].spec, run)
        if self._nemotron and ref.kind is MediaKind.VIDEO:
            # Its prompt names the time of every frame, not only of the first of each temporal patch.
            segment = replace(segment, times_s=(await media.info(ref)).timestamps_s)
        return segment

    async def _media(self) -> MediaClient:
        async with self._opening:
            if self._client is None:
                opened = MediaClient.open(await self._find_media(), self._secret, name="rollout worker")
                self._client = await self._stack.enter_async_context(opened)
            return self._client

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._sounds is not None:
            await self._sounds.close()
        await self._stack.aclose()

    # ------------------------------------------------------------------ into vLLM

    def engine_input(
        self, llm: Any, prompt: EnginePrompt, prefix: Sequence[int], salt: str, *, send_all: bool, again: bool
    ) -> Any:
        """vLLM's rendered form of a prompt: expanded ids, explicit places, no text.

        send_all: data goes with every item, else only where the engine process lacks it. again: after a miss.
        """
        from vllm.inputs import mm_input, tokens_input

        ids = [*prompt.token_ids, *prefix]
        items: Sequence[Item] | None = prompt.media
        if not items:
            return tokens_input(ids, cache_salt=salt)
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        self.counters["media_resent"] += float(again)
        kwargs: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        places: dict[str, list[Any]] = {}
        for item in items:
            modality, segment = str(item.kind), item.segment
            kwargs.setdefault(modality, []).append(self._data(llm, item, send_all or again))
            hashes.setdefault(modality, []).append(str(segment.key))
            place = PlaceholderRange(offset=item.offset, length=item.length)
            places.setdefault(modality, []).append(place)
        return mm_input(ids, MultiModalKwargsItems(kwargs), hashes, places, cache_salt=salt)

    def _data(self, llm: Any, item: Item, send: bool) -> Any:
        def make() -> Any:
            self.counters[_SENT[item.kind]] += 1
            inputs = self._nemotron_inputs(item) if self._nemotron else _tensors(item)
            return seams.media_item(llm, inputs, str(item.kind))

        return make() if send else seams.send_once(llm, str(item.segment.key), make)

    def _nemotron_inputs(self, item: Item) -> dict[str, Any]:
        import torch

        segment, dtype = item.segment, getattr(torch, nemotron.TOWERS)
        if item.kind is MediaKind.AUDIO:
            return nemotron.sound_inputs(segment.tensors)
        if item.kind is MediaKind.VIDEO:
            return nemotron.clip_inputs(segment.tensors, segment.times_s, dtype)
        return nemotron.picture_inputs(segment.tensors, segment.token_count, dtype)


def _tensors(item: Item) -> dict[str, Any]:
    """Copies: vLLM's tensors may be written to, the mapped segment must not be."""
    import torch

    tensors = {name: torch.from_numpy(array.copy()) for name, array in item.segment.tensors.items()}
    if item.kind is MediaKind.VIDEO:
        times = item.segment.times_s
        step = times[1] - times[0] if len(times) > 1 else 1.0
        tensors["second_per_grid_ts"] = torch.tensor(
            [step]
        )  # Qwen2.5-VL places clips in time; others ignore it
    return tensors


def _modalities(model: Path, architecture: str, engine: EngineConfig) -> dict[MediaKind, Modality]:
    """What the checkpoint takes and the settings allow. Raises UNSUPPORTED for a wish that we cannot fulfil."""
    kinds = {}
    if architecture in seams.LANGUAGE_IN_ENCODER and (engine.images_per_prompt or engine.videos_per_prompt):
        nemotron.check_config(read_config(model))
    if engine.images_per_prompt and _has_pictures(model):
        spec, token = read_image_processor(model), image_token_id(model)
        kinds[MediaKind.IMAGE] = Modality(spec, token, engine.images_per_prompt, _KNOBS[MediaKind.IMAGE])
    if engine.videos_per_prompt:
        _need_family(architecture, CLIPS, MediaKind.VIDEO, "clips")
        spec, token = read_video_processor(model, engine.clips), video_token_id(model)
        kinds[MediaKind.VIDEO] = Modality(spec, token, engine.videos_per_prompt, _KNOBS[MediaKind.VIDEO])
    if engine.sounds_per_prompt:
        _need_family(architecture, seams.LANGUAGE_IN_ENCODER, MediaKind.AUDIO, "sounds")
        nemotron.check_sounds(read_config(model))
        spec, token = ProcessorSpec("ParakeetExtractor", read_sound_config(model)), sound_token_id(model)
        kinds[MediaKind.AUDIO] = Modality(
            spec, token, engine.sounds_per_prompt, _KNOBS[MediaKind.AUDIO], sound_brackets(model)
        )
    return kinds


def _need_family(architecture: str, families: Collection[str], kind: MediaKind, what: str) -> None:
    if architecture not in families:
        message = f"{architecture} takes no {what} here; {', '.join(sorted(families))} do"
        raise OmnifleetError(Reason.UNSUPPORTED, message, knob=_KNOBS[kind])


def _sounds(model: Path, kinds: Mapping[MediaKind, Modality], engine: EngineConfig) -> Sounds | None:
    return Sounds(read_sound_config(model), engine.max_model_len) if MediaKind.AUDIO in kinds else None


def _placeholders(model: Path) -> list[int]:
    tokens = set()
    for token_id in (image_token_id, video_token_id, sound_token_id):
        with suppress(OmnifleetError):
            tokens.add(token_id(model))
    return sorted(tokens)


def _has_pictures(model: Path) -> bool:
    """Text models have neither an image processor nor a placeholder."""
    try:
        read_image_processor(model)
        image_token_id(model)
    except OmnifleetError:
        return False
    return True
