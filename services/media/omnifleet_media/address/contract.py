"""Decode contracts: how a source becomes frames. Part of an alias, never of an object's address."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid

RULES = 1
"""Version of the decode rules (docs/api/addresses.md). A change makes every alias miss, and no address change."""

STILL = "still"
CLIP_SAMPLINGS = ("uniform@1", "nemotron_vl@1")
_COLOUR = re.compile(r"[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class DecodeContract:
    """sampling: a named, versioned rule. num_frames 0 = all. fps 0 = not given. background: RRGGBB, lower case."""

    sampling: str = STILL
    num_frames: int = 0
    fps: float = 0.0
    temporal_patch: int = 1
    background: str = "ffffff"

    def as_alias_part(self) -> dict[str, Any]:
        """The mapping that `omnifleet.address.alias_key` hashes."""
        return {**asdict(self), "rules": RULES}


def still(background: str = "") -> DecodeContract:
    """The contract of a picture. Options of clips have no place in it, so that they never miss a picture's alias.

    Raises OmnifleetError(INVALID_REQUEST) for a background that is not RRGGBB.
    """
    return DecodeContract(background=_colour(background))


def clip(
    sampling: str, num_frames: int, fps: float, temporal_patch: int, background: str = ""
) -> DecodeContract:
    """The contract of a clip. Raises OmnifleetError: UNSUPPORTED sampling, INVALID_REQUEST for bad numbers."""
    if sampling not in CLIP_SAMPLINGS:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"sampling contract {sampling or 'none'!r} is not known; clips take {', '.join(CLIP_SAMPLINGS)}",
            knob="contract.sampling",
        )
    if fps < 0 or fps != fps:
        raise invalid(f"contract.fps {fps} must be 0 (not given) or positive", knob="contract.fps")
    return DecodeContract(sampling, num_frames, fps, max(temporal_patch, 1), _colour(background))


def _colour(text: str) -> str:
    colour = (text or "ffffff").lower()
    if not _COLOUR.fullmatch(colour):
        raise invalid(f"contract.background {text!r} is not RRGGBB in hex", knob="contract.background")
    return colour
