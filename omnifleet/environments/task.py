"""What an episode is about: one row of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnifleet.types import MediaRef


@dataclass(frozen=True, slots=True)
class Task:
    """id: unique and stable within a split. answer: for the environment's eyes. extra: JSON values.

    pictures: encoded bytes, as an environment's own `tasks` gives them. media: the same by digest, as `Session.task` has them.
    """

    id: str
    text: str
    answer: str = ""
    pictures: tuple[bytes, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[MediaRef, ...] = ()
