"""Nemotron Nano VL and Nemotron 3 Omni: model-ready segments in the form that vLLM's own processor gives its model.

vLLM brings its processor for this family and takes neither transformers' names nor its layout. Differences from the other families:

- Pictures travel as whole pictures, channels first; segments hold their patches (row-major, each channels first), as
  transformers makes them. Both are the same numbers.
- A clip takes more positions than its features: in front of each pair of frames stand words with their times. The encoder step
  embeds these words too, so its output is stale after every refit (`vllm_seams.LANGUAGE_IN_ENCODER`).
- vLLM reckons the times itself, from frame numbers and whole milliseconds a frame. It gets ours: milliseconds as numbers, one
  millisecond a frame.
- Sounds are features of vLLM's own extractor (`vllm_sounds`), in pieces of 30 s; `<so_start>` and `<so_end>` stand around them.
- Where the checkpoint takes sounds, 0.25.1 wants the number of their pieces with every item, be it a picture.
- Clips are never pruned (`video_pruning_rate`): which tokens are kept would depend on the weights of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.prompt import Brackets
from omnifleet.vision_grid import nemotron_clip_ids, nemotron_clip_labels

Arrays = Mapping[str, npt.NDArray[Any]]


TOWERS = "bfloat16"
"""What vLLM's encoders of this family compute in, whatever the engine's type: what they see comes to them in it."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UNSUPPORTED for a checkpoint whose pictures would end vLLM's engine, or are cut into fixed tiles: nobody makes such
    segments here.
    """
    _check_type(config, "pictures and clips", "images_per_prompt and videos_per_prompt 0")
    args = (config.get("vision_config") or {}).get("args") or {}
    if "min_num_patches" not in args:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            "this checkpoint cuts pictures into fixed tiles (vision_config.args has no min_num_patches)",
            knob="model.path",
        )


def check_sounds(config: Mapping[str, Any]) -> None:
    """Raises UNSUPPORTED for a checkpoint whose encoder of sounds would end vLLM's engine at the first one."""
    _check_type(config, "sounds", "sounds_per_prompt 0")


def _check_type(config: Mapping[str, Any], media: str, without: str) -> None:
    """vLLM gives encoders and their projections the type that the config says of the language model, and hands bfloat16 from
    one to the other.
    """
    text = config.get("text_config") or config.get("llm_config") or {}
    given = text.get("dtype") or text.get("torch_dtype") or TOWERS
    if given != TOWERS:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"config.json says {given} of its language model; vLLM computes {media} in {TOWERS} only: change text_config.dtype, "
            f"or serve none (rollout.engine.{without})",
            knob="model.path",
        )


def published_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM reads under the checkpoint's own names, which transformers' config class has renamed: more `hf_overrides`.

    config: config.json. Its encoder of sounds must be as written there: with transformers' defaults vLLM does not start.
    """
    from transformers import PreTrainedConfig

    if not config.get("sound_config"):
        return {}
    names = {"sound_config": PreTrainedConfig(**config["sound_config"])}
    return names | {name: config[name] for name in ("vit_hidden_size",) if name in config}


def picture_inputs(segment: Arrays, tokens: int, dtype: Any) -> dict[str, Any]:
    """One picture: patches [h w, 3 p p] -> pixel_values_flat [[3, H, W]], imgs_sizes [(H, W)], num_tokens_per_image [tokens].

    segment: `pixel_values` and `image_grid_hw` [1, 2] in patches. dtype: torch's, of the tower. Copies.
    """
    import torch

    patches, (rows, columns) = segment["pixel_values"], segment["image_grid_hw"][0].tolist()
    side = round((patches.shape[1] / 3) ** 0.5)
    whole = patches.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4)
    pixels = torch.from_numpy(np.ascontiguousarray(whole)).reshape(3, rows * side, columns * side).to(dtype)
    return {
        "pixel_values_flat": [pixels],
        "imgs_sizes": [(rows * side, columns * side)],
        "num_tokens_per_image": [tokens],
        "audio_num_clips": torch.empty(0, dtype=torch.int64),
    }


def clip_inputs(segment: Arrays, times_s: Sequence[float], dtype: Any) -> dict[str, Any]:
    """One clip: tiles `pixel_values_videos` [F, 3, H, W] and the seconds of its F frames. Copies."""
    import torch

    tiles = torch.from_numpy(segment["pixel_values_videos"].copy()).to(dtype)
    return {
        "pixel_values_flat_video": tiles,
        "video_num_patches": torch.tensor([len(tiles)]),
        "frames_indices": [torch.tensor([round(1000 * t) for t in times_s])],
        "frame_duration_ms": torch.tensor([1]),
        "audio_num_clips": torch.empty(0, dtype=torch.int64),
    }


def sound_inputs(segment: Arrays) -> dict[str, Any]:
    """One sound: `vllm_seams.SOUND_INPUTS` as tensors. The model gives them its own type. Copies."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in segment.items()}


def clip_ids(
    times_s: Sequence[float],
    tokens: int,
    temporal_patch: int,
    encode: Callable[[str], list[int]],
    token: int,
    brackets: Brackets,
) -> list[int]:
    """The positions of one clip, words and features, all of which the encoder step embeds.

    tokens: features of the whole clip, the same for each `temporal_patch` frames. encode: text -> ids, without special tokens.
    token, brackets: of pictures.
    """
    labels = [encode(label) for label in nemotron_clip_labels(times_s, temporal_patch)]
    return nemotron_clip_ids(labels, tokens // len(labels), token, brackets)
