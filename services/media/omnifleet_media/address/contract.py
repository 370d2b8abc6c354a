"""Decode contracts: how a source becomes frames or a track. Part of an alias, never of an object's address."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid

RULES = 2
"""Version of the decode rules (docs/api/addresses.md). A change makes every alias miss, and no address change."""

STILL, PICKED, TRACK = "still", "indices@1", "audio@1"
CLIP_SAMPLINGS = ("uniform@1", "nemotron_vl@1", PICKED)
SAMPLE_RATE = 16_000
_LOWEST_RATE, _HIGHEST_RATE = 4_000, 192_000
_COLOUR = re.compile(r"[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class DecodeContract:
    """sampling: a named, versioned rule. num_frames 0 = all. fps 0 = not given. background: RRGGBB, lower case.

    indices: frames of an `indices@1` clip. sample_rate: of an `audio@1` track.
    """

    sampling: str = STILL
    num_frames: int = 0
    fps: float = 0.0
    temporal_patch: int = 1
    background: str = "ffffff"
    indices: tuple[int, ...] = ()
    sample_rate: int = 0

    def as_alias_part(self) -> dict[str, Any]:
        """The mapping that `omnifleet.address.alias_key` hashes: what the sampling depends on, and the rules."""
        common = {"rules": RULES, "sampling": self.sampling}
        if self.sampling == TRACK:
            return {**common, "sample_rate": self.sample_rate}
        common |= {"background": self.background}
        if self.sampling == STILL:
            return common
        if self.sampling == PICKED:
            return {**common, "indices": list(self.indices)}
        return {
            **common,
            "fps": self.fps,
            "num_frames": self.num_frames,
            "temporal_patch": self.temporal_patch,
        }


def still(background: str = "") -> DecodeContract:
    """The contract of a picture. Options of clips have no place in it, so that they never miss a picture's alias.

    Raises OmnifleetError(INVALID_REQUEST) for a background that is not RRGGBB.
    """
    return DecodeContract(background=_colour(background))


def clip(
    sampling: str,
    num_frames: int = 0,
    fps: float = 0.0,
    temporal_patch: int = 1,
    background: str = "",
    indices: Sequence[int] = (),
) -> DecodeContract:
    """The contract of a clip. With both, `num_frames` is the most and `fps` asks for fewer.

    Raises OmnifleetError: UNSUPPORTED sampling, INVALID_REQUEST for bad numbers.
    """
    if sampling not in CLIP_SAMPLINGS:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"sampling contract {sampling or 'none'!r} is not known; clips take {', '.join(CLIP_SAMPLINGS)}",
            knob="contract.sampling",
        )
    if not 0 <= fps < float("inf"):
        raise invalid(f"contract.fps {fps} must be 0 (not given) or positive", knob="contract.fps")
    if (sampling == PICKED) != bool(indices):
        raise invalid(
            f"contract.indices go with sampling {PICKED}, and {PICKED} needs some", knob="contract.indices"
        )
    if sampling == PICKED:
        return DecodeContract(PICKED, background=_colour(background), indices=tuple(indices))
    return DecodeContract(sampling, num_frames, fps, max(temporal_patch, 1), _colour(background))


def track(sample_rate: int = 0) -> DecodeContract:
    """The contract of an audio track: one channel of float32 at `sample_rate` samples a second, 0 = 16000.

    Raises OmnifleetError(INVALID_REQUEST) for a rate that no processor has.
    """
    rate = sample_rate or SAMPLE_RATE
    if not _LOWEST_RATE <= rate <= _HIGHEST_RATE:
        raise invalid(
            f"contract.sample_rate {rate} is not in {_LOWEST_RATE} to {_HIGHEST_RATE}",
            knob="contract.sample_rate",
        )
    return DecodeContract(TRACK, sample_rate=rate)


def _colour(text: str) -> str:
    colour = (text or "ffffff").lower()
    if not _COLOUR.fullmatch(colour):
        raise invalid(f"contract.background {text!r} is not RRGGBB in hex", knob="contract.background")
    return colour
