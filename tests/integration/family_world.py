"""Batches with pictures and clips for any family, and the same samples through plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnifleet.types import Digest, MediaKind
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.objectives.logprobs import token_logprobs
from tests.integration.batch_sample import ith_sample

GRIDS = {"a": (1, 4, 4), "b": (1, 4, 6), "c": (1, 4, 4), "v": (2, 4, 4)}
MEDIA = ("a", "ab", "vbca", "av", "a", "")
"""Of each sample; `v` is a clip of two temporal patches, the others are pictures."""
TEMPERATURE = 0.7


def batch_for(source: Path, *, seed: int = 0) -> StepBatch:
    """Six samples of several lengths in three groups; media shared between samples and repeated."""
    config = json.loads((source / "config.json").read_text())
    qwen3 = config["model_type"].startswith("qwen3_vl")
    random = np.random.default_rng(seed)
    values = 3 * 2 * config["vision_config"]["patch_size"] ** 2
    segments: dict[Digest, Any] = {}
    for key, grid in GRIDS.items():
        pixels = random.standard_normal((int(np.prod(grid)), values)).astype(np.float32)
        segments[Digest(key)] = (
            {
                "pixel_values_videos": pixels,
                "video_grid_thw": np.array([grid]),
                "second_per_grid_ts": np.array([0.5]),
            }
            if key == "v"
            else {"pixel_values": pixels, "image_grid_thw": np.array([grid])}
        )
    samples = []
    for i, keys in enumerate(MEDIA):
        prompt = [10 + i]
        for key in keys:
            t, h, w = GRIDS[key]
            token = config["video_token_id" if key == "v" else "image_token_id"]
            parts = t if qwen3 else 1  # Qwen3-VL writes each temporal patch by itself, after its time
            for part in range(parts):
                prompt += [50 + part, config["vision_start_token_id"]]
                prompt += [token] * (t * h * w // 4 // parts)
                prompt += [config["vision_end_token_id"]]
        prompt += random.integers(0, 300, 3 + i).tolist()
        reply = random.integers(0, 300, 4 + 2 * (i % 3)).tolist()
        kinds = [MediaKind.VIDEO if key == "v" else MediaKind.IMAGE for key in keys]
        samples.append(ith_sample(i, prompt, reply, list(zip(kinds, keys, strict=True))))
    return StepBatch(samples, 0, segments)


def plain_logprobs(model: Any, sample: TrainingSample, batch: StepBatch) -> Tensor:
    """[response] logprobs by transformers as its documentation says: no padding, pixels for every reference."""
    config = model.config
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
    }
    segments = [batch.segments[key] for key in sample.segment_keys]
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        if found := [segment[name] for segment in segments if name in segment]:
            arguments[name] = torch.from_numpy(np.concatenate(found))
    if config.model_type == "qwen2_5_vl" and "video_grid_thw" in arguments:
        arguments["second_per_grid_ts"] = torch.tensor([0.5] * len(arguments["video_grid_thw"]))
    model.model.rope_deltas = None
    logits = model(**arguments, use_cache=False).logits
    start = len(sample.prompt_token_ids)
    return token_logprobs(logits[:, start - 1 : -1], ids[:, start:], temperature=TEMPERATURE)[0]


def close_to(ours: Sequence[Any], expected: Sequence[Any], *, rtol: float) -> None:
    """Arrays of logprobs, sample by sample, within `rtol` of the largest of them."""
    for one, other in zip(ours, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * float(np.abs(other).max()))
