"""Batches of pictures and clips for a tiny Nemotron Omni, as the media service makes them, and plain transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor
from torch.overrides import TorchFunctionMode

from omnifleet.processor import (
    ProcessorSpec,
    image_token_id,
    picture_brackets,
    read_image_processor,
    read_video_processor,
)
from omnifleet.types import Digest, MediaKind
from omnifleet.vision_grid import nemotron_clip_ids
from omnifleet_media.segment import work
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.objectives.logprobs import token_logprobs
from tests.integration.batch_sample import ith_sample

SIZES = {"a": (1, 64, 64), "b": (1, 40, 100), "c": (1, 64, 64), "v": (3, 48, 90), "u": (2, 64, 64)}
"""(frames, height, width) of each medium; `v` (an odd number of frames) and `u` are clips."""
MEDIA = ("a", "ab", "vbca", "av", "u", "")
"""Of each sample."""
TEMPERATURE = 0.7
CLIPS: Mapping[str, bool | int] = {"video_target_num_patches": 16, "video_maintain_aspect_ratio": True}


def segment(spec: ProcessorSpec, frames: Any) -> dict[str, Any]:
    """Model-ready tensors of frames uint8 [F, H, W, 3], by the media service's own code."""
    processor = work._processor(spec.class_name, spec.config_json, spec.config)
    output = work._run(processor, frames, clip=work.takes_clips(spec.class_name))
    _, (body,) = work._packed(processor, output, spec.class_name, spec.config)
    return {name: tensor.numpy() for name, tensor in load(bytes(body)).items()}


def segments_for(source: Path, clips: Mapping[str, bool | int] = CLIPS) -> dict[Digest, Any]:
    """One of each of SIZES."""
    random = np.random.default_rng(3)
    pictures, videos = read_image_processor(source), read_video_processor(source, clips)
    made = {}
    for key, (frames, height, width) in SIZES.items():
        pixels = random.integers(0, 256, (frames, height, width, 3), np.uint8)
        made[Digest(key)] = segment(videos if frames > 1 else pictures, pixels)
    return made


def batch_for(source: Path, *, seed: int = 0, clips: Mapping[str, bool | int] = CLIPS) -> StepBatch:
    """Six samples of several lengths in three groups; media shared between samples, repeated, and mixed in one prompt."""
    random = np.random.default_rng(seed)
    segments = segments_for(source, clips)
    token, brackets = image_token_id(source), picture_brackets(source)
    samples = []
    for i, keys in enumerate(MEDIA):
        prompt = [10 + i]
        for key in keys:
            one = segments[Digest(key)]
            if "video_grid_thw" in one:
                t, h, w = one["video_grid_thw"][0].tolist()
                prompt += nemotron_clip_ids([[50, 51 + j] for j in range(t)], h * w // 4, token, brackets)
            else:
                prompt += [*brackets[0], *[token] * (len(one["pixel_values"]) // 4), *brackets[1]]
        prompt += random.integers(0, 300, 3 + i).tolist()
        reply = random.integers(0, 300, 4 + 2 * (i % 3)).tolist()
        kinds = [MediaKind.VIDEO if SIZES[key][0] > 1 else MediaKind.IMAGE for key in keys]
        samples.append(ith_sample(i, prompt, reply, list(zip(kinds, keys, strict=True))))
    return StepBatch(samples, 0, segments)


def plain_logprobs(model: Any, sample: TrainingSample, batch: StepBatch) -> Tensor:
    """[response] logprobs by transformers' own functions: no padding, every reference through the tower by itself.

    Where there are pictures alone it is the whole model's forward; with clips that forward fails (5.18), so what
    `get_image_features` and `get_video_features` say is put in place of the picture tokens.
    """
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    segments = [batch.segments[key] for key in sample.segment_keys]
    clips = any("video_grid_thw" in one for one in segments)
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    if clips:
        features = torch.cat([_features(model, one) for one in segments])
        embeds = model.get_input_embeddings()(ids)
        places = (ids == model.config.image_token_id)[..., None].expand_as(embeds)
        arguments["inputs_embeds"] = embeds.masked_scatter(places, features.to(embeds.dtype))
    else:
        arguments["input_ids"] = ids
        for name in ("pixel_values", "image_grid_hw") if segments else ():
            arguments[name] = torch.from_numpy(np.concatenate([one[name] for one in segments]))
    logits = model(**arguments).logits
    start = len(sample.prompt_token_ids)
    return token_logprobs(logits[:, start - 1 : -1], ids[:, start:], temperature=TEMPERATURE)[0]


def _features(model: Any, one: dict[str, Any]) -> Tensor:
    if "video_grid_thw" in one:
        output = model.get_video_features(torch.from_numpy(one["pixel_values_videos"]), return_dict=True)
        features: Tensor = output.pooler_output.flatten(0, 1)
        return features
    pixels, grid = torch.from_numpy(one["pixel_values"]), torch.from_numpy(one["image_grid_hw"])
    return torch.cat(list(model.get_image_features(pixels, grid, return_dict=True).pooler_output))


class InDouble(TorchFunctionMode):
    """Inside, what asks for float32 gets float64: transformers' Mamba, its norms and its routers compute in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if settings.get("dtype") is torch.float32:
                settings["dtype"] = torch.float64
        return func(*args, **settings)


def config_of(source: Path) -> dict[str, Any]:
    """The checkpoint's config.json."""
    body: dict[str, Any] = json.loads((source / "config.json").read_text())
    return body


def both_ways(
    policy: Any, batch: StepBatch, plain: Callable[[Any, TrainingSample, StepBatch], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Gradients in float64 of the sum of all logprobs: each weight's name, the policy's and, from `plain` with every reference by
    itself, the naive one. The sums are compared. Weights without a gradient in the policy are left out."""
    weights = {name: p for name, p in policy._model.named_parameters() if p.requires_grad}
    policy._model.double()
    try:
        with InDouble():
            ours = torch.zeros((), dtype=torch.float64)
            for micro in policy._collate(batch, range(len(batch.samples))):
                ours = ours + (policy._forward(batch)(micro) * micro.token_mask[:, micro.first :]).sum()
            torch.autograd.backward(ours)
            gradients = {name: p.grad.clone() for name, p in weights.items() if p.grad is not None}
            policy._model.zero_grad()
            naive = torch.stack([plain(policy._model, s, batch).sum() for s in batch.samples]).sum()
            torch.autograd.backward(naive)
        torch.testing.assert_close(ours, naive, rtol=1e-10, atol=0)
        for name, gradient in gradients.items():
            yield name, gradient, weights[name].grad
    finally:
        policy._model.zero_grad()
        policy._model.float()


def close_gradients(ours: Tensor, naive: Tensor) -> None:
    """To 1e-9 of the largest."""
    torch.testing.assert_close(ours, naive, rtol=0, atol=1e-9 * float(naive.abs().max()) + 1e-14)
