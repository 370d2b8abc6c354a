"""What a scorer is: a named, versioned function from a reply to a verdict."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from omnifleet.config.base import StrictModel
from omnifleet.types import Mark


@dataclass(frozen=True, slots=True)
class Reply:
    """What a scorer sees.

    response: assistant text of all turns. ground_truth: the reference answer. media: content digests.
    extra: fields of the dataset row, as JSON values. prompt_suffix: what the chat template opened, e.g. "<think>".
    """

    response: str
    ground_truth: str
    prompt: str = ""
    media: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    prompt_suffix: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """score: any finite number. correct: None where the scorer has no opinion on correctness.

    mark: how the score came about; a scorer itself says SCORED or UNPARSEABLE.
    """

    score: float
    correct: bool | None = None
    mark: Mark = Mark.SCORED


UNPARSEABLE = Verdict(0.0, False, Mark.UNPARSEABLE)
"""The reply holds no answer that the scorer can read: wrong, and marked."""


def right_or_wrong(correct: bool) -> Verdict:
    """1 and True, or 0 and False."""
    return Verdict(float(correct), correct)


class NoParams(StrictModel):
    """A scorer without parameters."""


class Network(Protocol):
    """What scorers that ask other services may do; `omnifleet_reward.network` is one."""

    def model(self, endpoint: str) -> str:
        """Name of the model at a configured endpoint."""
        ...

    async def post(self, endpoint: str, body: Mapping[str, Any], read: Callable[[Any], Verdict]) -> Verdict:
        """What `read` makes of the answer to `body`; within the endpoint's budget, from its cache where it can."""
        ...


@dataclass(frozen=True, slots=True)
class Scorer:
    """A registered scorer. A change of what it returns for any reply is a new version.

    judge: (reply, params) -> verdict, run in a scorer process; raising makes the item unscorable.
    ask: instead of judge, for scorers that wait for another service: (reply, params, network) -> verdict.
    params: model of its parameters.
    examples: (prompt suffix, params) -> replies that get the most a reply in that template can get; None if unknown.
    wrap: (prompt suffix, params, reply) -> the reply as this scorer likes it, if it judges the form around an answer.
    beyond: score of a reply whose judging uses up the item's time or memory; None makes such an item unscorable.
    prepare: slow imports, done once in a process before the clock of its first item starts.
    """

    name: str
    version: str
    doc: str
    judge: Callable[[Reply, Any], Verdict] | None = None
    params: type[BaseModel] = NoParams
    examples: Callable[[str, Any], Sequence[Reply]] | None = None
    wrap: Callable[[str, Any, str], str] | None = None
    beyond: float | None = None
    prepare: Callable[[], None] | None = None
    ask: Callable[[Reply, Any, Network], Awaitable[Verdict]] | None = None

    @property
    def label(self) -> str:
        """name@version."""
        return f"{self.name}@{self.version}"
