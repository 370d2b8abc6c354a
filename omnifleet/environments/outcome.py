"""How an episode ended. Only `Scored` and `Answered` come to a reward; nothing else is ever turned into one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from omnifleet.errors import OmnifleetError


@dataclass(frozen=True, slots=True)
class Scored:
    """The episode was judged. components: parts of the reward by name, for metrics. Raises ValueError unless all are finite."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.components}.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is a finite number, not {value!r}")


@dataclass(frozen=True, slots=True)
class Answered:
    """The recipe's scorers judge `text`, as they judge the reply of a row without an environment."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptError:
    """The task cannot be played, now or later: its row is given up."""

    message: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """The environment raised, or ended its process. The task is tried again, a bounded number of times."""

    message: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The episode outlived its time, seconds. Counts like a crash."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A service failed the episode: no fault of the environment or the task."""

    error: OmnifleetError


Outcome = Scored | Answered | PromptError | Crashed | TimedOut | Lost
"""What `Environment.run` returns is `Scored`, `Answered` or `PromptError`; the others are what the pool makes of the rest."""
