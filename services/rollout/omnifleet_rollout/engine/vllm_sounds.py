"""Sounds on their way into vLLM: tracks of the media service, made into features by vLLM's own extractor, once each.

Only Nemotron Omni takes sounds here. The media service gives one channel of float32 at the rate of its encoder, so nothing is
decoded or resampled; what leaves is a segment like a picture's, keyed by the track's digest and the extractor's fingerprint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from omnifleet.address import processor_fingerprint, segment_key
from omnifleet.client.media import MediaClient, Segment
from omnifleet.client.media.cache import LocalCache
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.flight import SingleFlight
from omnifleet.sounds import sound_tokens
from omnifleet.types import Digest, MediaRef
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.vllm_launch import vllm_version

_KEPT_BYTES = 64 << 20
"""Features of some twenty minutes: releases that want data with every request ask for them again and again."""


class Sounds:
    """Features of tracks. config: of the checkpoint's encoder of sounds. longest: tokens that fit into the engine."""

    def __init__(self, config: Mapping[str, Any], longest: int) -> None:
        self._config, self._longest = dict(config), longest
        self._extractor: Any = None
        self._fingerprint = Digest("")
        self._kept: LocalCache[Digest, Segment] = LocalCache(_KEPT_BYTES)
        self._making: SingleFlight[Digest, Segment] = SingleFlight()
        self._one = (
            asyncio.Lock()
        )  # the extractor's way of not compiling itself is a switch of the whole process

    async def segment(self, media: MediaClient, ref: MediaRef) -> Segment:
        """`input_audio_features` float32 [pieces, frames, mels], `feature_attention_mask` bool [pieces, frames] and
        `audio_num_clips` int64 [1] of a track.

        Raises INVALID_MEDIA for one of another rate, PROMPT_TOO_LONG, and what the media service says.
        """
        info = await media.info(ref)
        rate = int(self._config["sampling_rate"])
        if info.sample_rate != rate:
            raise invalid(
                f"{ref.url} has {info.sample_rate} samples a second, the model's encoder takes {rate}: store it at that rate",
                reason=Reason.INVALID_MEDIA,
                knob="contract.sample_rate",
            )
        if sound_tokens(self._config, info.samples) >= self._longest:
            raise invalid(
                f"{ref.url} lasts {info.samples / rate:.1f} s: its tokens alone exceed max_model_len {self._longest}",
                reason=Reason.PROMPT_TOO_LONG,
                knob="rollout.engine.max_model_len",
            )
        kept = self._kept.get(ref.digest)
        return kept or await self._making.do(ref.digest, lambda: self._make(media, ref))

    async def _make(self, media: MediaClient, ref: MediaRef) -> Segment:
        samples = await media.track(ref)
        async with self._one:
            tensors, tokens = await asyncio.to_thread(self._extract, samples)
        size = sum(array.nbytes for array in tensors.values())
        key = segment_key(ref.digest, self._fingerprint)
        segment = Segment(key, self._fingerprint, tokens, (), tensors, size, False)
        self._kept.keep(ref.digest, segment, size)
        return segment

    def _extract(self, samples: Any) -> tuple[dict[str, Any], int]:
        if self._extractor is None:
            self._extractor = seams.sound_extractor(self._config)
            settings, library = asdict(self._extractor.config), f"vllm {vllm_version()}"
            self._fingerprint = processor_fingerprint(
                type(self._extractor).__name__, settings, library, "audio@1"
            )
        tensors = seams.extract_sound(self._extractor, samples)
        tokens = int(self._extractor.audio_token_count(len(samples)))
        if tokens != sound_tokens(self._config, len(samples)):
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"this vLLM gives a sound of {len(samples)} samples {tokens} tokens, "
                f"the trainer {sound_tokens(self._config, len(samples))}",
                knob="the installed vllm version",
            )
        return tensors, tokens

    async def close(self) -> None:
        """Stop what is being made. Idempotent."""
        await self._making.close()
