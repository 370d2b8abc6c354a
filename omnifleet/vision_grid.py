"""How many patches and tokens a media item becomes, by the rules of each family: plain numbers, no tensor library.

The processors themselves are the oracle (tests compare with them); this is for whoever must know the size of a prompt
before the tensors are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.errors import invalid
from omnifleet.prompt import Brackets

_QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_QWEN_CLIP_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
_LONGEST_RATIO = 200


@dataclass(frozen=True, slots=True)
class VisionGrid:
    """Patches in time, rows and columns; `merge` x `merge` patches of one moment make one token."""

    t: int
    h: int
    w: int
    merge: int

    @property
    def tokens_per_moment(self) -> int:
        """Tokens of one temporal patch (tubelet)."""
        return (self.h // self.merge) * (self.w // self.merge)

    @property
    def tokens(self) -> int:
        """Tokens of the whole item."""
        return self.t * self.tokens_per_moment


def moments(frames: int, temporal_patch: int) -> int:
    """Temporal patches of `frames` frames; the last is filled up with its last frame."""
    return -(-frames // max(temporal_patch, 1))


def qwen2vl_grid(config: Mapping[str, Any], height: int, width: int, frames: int = 0) -> VisionGrid:
    """Grid of the Qwen2-VL and Qwen2.5-VL family for frames of height x width pixels; frames 0 = a picture.

    Both sides are rounded to multiples of patch x merge (halves to even), then scaled into the pixel budget; no side
    gets shorter than one multiple. Raises OmnifleetError(INVALID_REQUEST) above an aspect ratio of 200.
    """
    patch, merge = int(config.get("patch_size", 14)), int(config.get("merge_size", 2))
    temporal = int(config.get("temporal_patch_size", 2))
    least, most = _qwen_budget(config, _QWEN_CLIP_SIZE if frames else _QWEN_SIZE)
    if frames and config.get("cap_pixels_per_frame"):
        total = int(int(config.get("max_video_tokens", 128_000)) * (patch * merge) ** 2 * 0.9)
        most = max(min(most, total * temporal // frames), int(least * 1.05))
    high, wide = _qwen_size(height, width, patch * merge, least, most)
    return VisionGrid(moments(frames, temporal) if frames else 1, high // patch, wide // patch, merge)


def nemotron_clip_grid(config: Mapping[str, Any], height: int, width: int, frames: int) -> VisionGrid:
    """Grid of a clip for Nemotron Omni: one tile near `video_target_num_patches` (1024), aspect kept, small clips grown.

    The tile's pixels are `h` and `w` times `patch_size` (16).
    """
    target = int(config.get("video_target_num_patches", 1024))
    merge = round(1 / float(config.get("downsample_ratio", 0.5)))
    temporal = int(config.get("temporal_patch_size", 2))
    if config.get("video_maintain_aspect_ratio", True):
        ratio = width / max(height, 1)
        high, wide = max(round(math.sqrt(target / ratio)), 1), max(round(math.sqrt(target * ratio)), 1)
        up = _up(high, merge), _up(wide, merge)
        high, wide = up if up[0] * up[1] <= target else (_down(high, merge), _down(wide, merge))
    else:
        high = wide = _down(math.isqrt(target), merge)
    return VisionGrid(moments(frames, temporal), high, wide, merge)


def nemotron_clip_text(
    times_s: Sequence[float],
    tokens_per_moment: int,
    temporal_patch: int = 2,
    *,
    token: str = "<image>",
    opening: str = "<img>",
    closing: str = "</img>",
) -> str:
    """What a clip is in a Nemotron Omni prompt: each temporal patch named with the times of its frames, then its tokens.

    times_s: seconds of each frame, as the manifest of a `nemotron_vl@1` clip has them (whole milliseconds a frame).
    """
    chunk = opening + token * tokens_per_moment + closing
    return "".join(label + chunk for label in nemotron_clip_labels(times_s, temporal_patch))


def nemotron_clip_labels(times_s: Sequence[float], temporal_patch: int = 2) -> list[str]:
    """What stands before the tokens of each temporal patch of a clip; all but the first begin on a new line.

    vLLM tokenises each of them alone, so that no token spans a label and what is before it.
    """
    labels = []
    for first in range(0, len(times_s), temporal_patch):
        frames = [
            f"frame {i + 1} sampled at {times_s[i]:.2f} seconds"
            for i in range(first, min(first + temporal_patch, len(times_s)))
        ]
        frames[0] = frames[0].capitalize()
        labels.append(("\n" if first else "") + " and ".join(frames) + ": ")
    return labels


def nemotron_clip_ids(
    labels: Sequence[Sequence[int]], tokens_per_moment: int, token: int, brackets: Brackets
) -> list[int]:
    """A clip in a Nemotron Omni prompt as vLLM has it: `labels` tokenised one by one, each before its bracketed tokens."""
    before, after = brackets
    ids: list[int] = []
    for label in labels:
        ids += [*label, *before, *[token] * tokens_per_moment, *after]
    return ids


def _qwen_budget(config: Mapping[str, Any], default: Mapping[str, int]) -> tuple[int, int]:
    size = {**default, **(config.get("size") or {})}
    least = config.get("min_pixels") or size.get("min_pixels") or size["shortest_edge"]
    most = config.get("max_pixels") or size.get("max_pixels") or size["longest_edge"]
    return int(least), int(most)


def _qwen_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    ratio = max(height, width) / min(height, width)
    if ratio > _LONGEST_RATIO:
        raise invalid(
            f"{width} x {height} has an aspect ratio of {ratio:g}, at most {_LONGEST_RATIO} is allowed"
        )
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > most:
        shrink = math.sqrt(height * width / most)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif high * wide < least:
        grow = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _down(count: int, multiple: int) -> int:
    return max(multiple, count - count % multiple)
