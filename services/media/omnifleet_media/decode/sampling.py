"""Which frames of a clip are taken, under a named contract. Numbers only: no decoder is needed to say it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnifleet.errors import OmnifleetError, Reason, invalid


def frame_indices(
    sampling: str,
    total: int,
    source_fps: float,
    num_frames: int,
    fps: float,
    temporal_patch: int,
    indices: Sequence[int] = (),
) -> list[int]:
    """Indices of the frames to take, in order.

    total: frames in the clip, at least 1. source_fps: frames a second. num_frames 0 = all. fps 0 = not given.
    indices: what `indices@1` takes, as they are. Raises OmnifleetError: UNSUPPORTED for another sampling,
    INVALID_REQUEST for an index beyond the clip.
    """
    if sampling == "indices@1":
        return _picked(total, indices)
    asked = num_frames if num_frames > 0 else total
    if fps > 0 and source_fps > 0:
        asked = min(asked, max(1, int(total / source_fps * fps)))
    if sampling == "uniform@1":
        return _uniform(total, asked, temporal_patch)
    if sampling == "nemotron_vl@1":
        return _nemotron_vl(total, source_fps, asked, temporal_patch)
    raise OmnifleetError(
        Reason.UNSUPPORTED, f"sampling contract {sampling!r} is not known", knob="contract.sampling"
    )


def check_length(seconds: float, limit: float) -> None:
    """A clip or animation is not longer than the limit. Raises OmnifleetError(LIMIT_EXCEEDED)."""
    if seconds > limit:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"the clip has {seconds:.1f} s, at most {limit:g} s are allowed",
            knob="media.limits.seconds",
        )


def prompt_clock(indices: Sequence[int], source_fps: float) -> list[float]:
    """Seconds of frames on the clock of Nemotron VL prompts: whole milliseconds a frame, int(1000 / fps), from frame 0.

    At 29.97 frames a second that is 33 ms a frame, a little fast; prompts name these times, so the manifest has them.
    """
    milliseconds = int(1000 / source_fps) if source_fps > 0 else 0
    return [i * milliseconds / 1000 for i in indices]


def _picked(total: int, indices: Sequence[int]) -> list[int]:
    beyond = [i for i in indices if i >= total]
    if beyond:
        raise invalid(
            f"frame {beyond[0]} is out of range: the clip has frames 0 to {total - 1}",
            knob="contract.indices",
        )
    return list(indices)


def _uniform(total: int, asked: int, temporal_patch: int) -> list[int]:
    """floor(linspace(0, N - 1, n)); n at most N, then rounded down to whole temporal patches where that leaves one."""
    n = min(asked, total)
    if n >= temporal_patch:
        n -= n % temporal_patch
    return [int(i) for i in np.floor(np.linspace(0, total - 1, n))]


def _nemotron_vl(total: int, source_fps: float, asked: int, temporal_patch: int) -> list[int]:
    """NeMo RL's sampling of Nemotron VL clips: uniform in time, rounded to frames, halves to even, and once more."""
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
