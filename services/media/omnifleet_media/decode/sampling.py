"""Which frames of a clip are taken, under a named contract. Numbers only: no decoder is needed to say it."""

from __future__ import annotations

import numpy as np

from omnifleet.errors import OmnifleetError, Reason


def frame_indices(
    sampling: str, total: int, source_fps: float, num_frames: int, fps: float, temporal_patch: int
) -> list[int]:
    """Indices of the frames to take, in order.

    total: frames in the clip, at least 1. source_fps: frames a second. num_frames 0 = all. fps 0 = not given.
    Raises OmnifleetError(UNSUPPORTED) for another sampling.
    """
    asked = num_frames if num_frames > 0 else total
    if sampling == "uniform@1":
        return _uniform(total, source_fps, asked, fps, temporal_patch)
    if sampling == "nemotron_vl@1":
        return _nemotron_vl(total, source_fps, asked, fps, temporal_patch)
    raise OmnifleetError(
        Reason.UNSUPPORTED, f"sampling contract {sampling!r} is not known", knob="contract.sampling"
    )


def _uniform(total: int, source_fps: float, asked: int, fps: float, temporal_patch: int) -> list[int]:
    """floor(linspace(0, N - 1, n)); n at most N, then rounded down to whole temporal patches where that leaves one."""
    if fps > 0 and source_fps > 0:
        asked = min(asked, max(1, int(total / source_fps * fps)))
    n = min(asked, total)
    if n >= temporal_patch:
        n -= n % temporal_patch
    return [int(i) for i in np.floor(np.linspace(0, total - 1, n))]


def _nemotron_vl(total: int, source_fps: float, asked: int, fps: float, temporal_patch: int) -> list[int]:
    """NeMo RL's sampling of Nemotron VL clips: uniform in time, rounded to frames, halves to even."""
    if fps > 0 and source_fps > 0:
        asked = min(asked, max(1, int(total / source_fps * fps)))
    asked = max(1, asked)
    n = _whole_patches(min(asked, total), asked, total, temporal_patch)
    if n <= 1 or total <= 1 or source_fps <= 0:
        return [0] * n
    times = np.linspace(0, (total - 1) / source_fps, n)
    first = np.clip(np.round(times * source_fps), 0, total - 1)
    return [int(i) for i in np.clip(np.round(first / source_fps * source_fps), 0, total - 1)]


def _whole_patches(n: int, asked: int, total: int, temporal_patch: int) -> int:
    """Up to the next multiple if clip and request allow it, else down, but never below one patch."""
    if temporal_patch <= 1 or n % temporal_patch == 0:
        return n
    up = n + temporal_patch - n % temporal_patch
    if up <= total and up <= asked:
        return up
    return max(temporal_patch, n - n % temporal_patch)
