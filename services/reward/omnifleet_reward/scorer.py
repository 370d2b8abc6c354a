"""What a scorer is: a named, versioned function from a reply to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from omnifleet.config.base import StrictModel


@dataclass(frozen=True, slots=True)
class Reply:
    """What a scorer sees.

    response: assistant text of all turns. ground_truth: the reference answer. media: content digests.
    extra: fields of the dataset row, as JSON values.
    """

    response: str
    ground_truth: str
    prompt: str = ""
    media: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """score: any finite number. correct: None where the scorer has no opinion on correctness."""

    score: float
    correct: bool | None = None


class NoParams(StrictModel):
    """A scorer without parameters."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A registered scorer. A change of what it returns for any reply is a new version.

    params: model of its parameters. judge: (reply, params) -> verdict; raising makes the item unscorable.
    examples: (prompt suffix, params) -> replies that get the most a reply in that template can get; None if unknown.
    """

    name: str
    version: str
    doc: str
    judge: Callable[[Reply, Any], Verdict]
    params: type[BaseModel] = NoParams
    examples: Callable[[str, Any], Sequence[Reply]] | None = None

    @property
    def label(self) -> str:
        """name@version."""
        return f"{self.name}@{self.version}"
