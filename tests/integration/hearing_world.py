"""Batches of sounds, beside pictures, for a tiny Nemotron Omni that hears, as the media service makes them; plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnifleet.processor import image_token_id, picture_brackets, read_image_processor, read_sound_processor
from omnifleet.sounds import sound_brackets, sound_token_id, sound_tokens
from omnifleet.types import Digest, MediaKind
from omnifleet_media.segment.sound import features_of
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.objectives.logprobs import token_logprobs
from tests.integration.batch_sample import ith_sample
from tests.integration.nemotron_world import TEMPERATURE, segment
from tests.sounds import tone

SOUNDS = {"s": 16_000, "t": 3_300, "l": 9_700}
"""Samples of each; none a multiple of eight frames, of which transformers would make a feature more."""
MEDIA = ("s", "st", "lsas", "a", "t", "")
"""Of each sample; `a` is a picture."""
FROZEN = ("sound_encoder.*", "sound_projection.*")


def batch_for(source: Path) -> StepBatch:
    """Six samples in three groups; sounds shared between samples, repeated, and beside a picture."""
    random, spec = np.random.default_rng(0), read_sound_processor(source)
    segments: dict[Digest, Any] = {}
    for key, samples in SOUNDS.items():
        made = features_of(tone(samples, 200 + samples / 20), spec.config)
        segments[Digest(key)] = {name: tensor.numpy() for name, tensor in made.items()}
    pixels = random.integers(0, 256, (1, 64, 64, 3), np.uint8)
    segments[Digest("a")] = segment(read_image_processor(source), pixels)
    prompts: dict[str, list[int]] = {
        key: [
            *sound_brackets(source)[0],
            *[sound_token_id(source)] * sound_tokens(spec.config, samples),
            *sound_brackets(source)[1],
        ]
        for key, samples in SOUNDS.items()
    }
    patches = len(segments[Digest("a")]["pixel_values"])
    before, after = picture_brackets(source)
    prompts["a"] = [*before, *[image_token_id(source)] * (patches // 4), *after]
    samples = []
    for i, keys in enumerate(MEDIA):
        prompt = [10 + i, *(token for key in keys for token in prompts[key])]
        prompt += random.integers(0, 300, 3 + i).tolist()
        reply = random.integers(0, 300, 4 + 2 * (i % 3)).tolist()
        kinds = [MediaKind.IMAGE if key == "a" else MediaKind.AUDIO for key in keys]
        samples.append(ith_sample(i, prompt, reply, list(zip(kinds, keys, strict=True))))
    return StepBatch(samples, 0, segments)


def plain_logprobs(model: Any, sample: TrainingSample, batch: StepBatch) -> Tensor:
    """[response] logprobs by the whole forward of transformers: every reference through its encoder, sample by sample."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    segments = [batch.segments[key] for key in sample.segment_keys]
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    pictures = [one for one in segments if "pixel_values" in one]
    for name in ("pixel_values", "image_grid_hw") if pictures else ():
        arguments[name] = torch.from_numpy(np.concatenate([one[name] for one in pictures]))
    sounds = [one for one in segments if "input_features" in one]
    for name in ("input_features", "input_features_mask") if sounds else ():
        pieces = [torch.from_numpy(one[name][0]) for one in sounds]
        arguments[name] = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    logits = model(input_ids=ids, **arguments).logits
    start = len(sample.prompt_token_ids)
    return token_logprobs(logits[:, start - 1 : -1], ids[:, start:], temperature=TEMPERATURE)[0]
