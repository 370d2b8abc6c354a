"""What a gym is: a class with one coroutine."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from omnifleet.environments.outcome import Outcome
from omnifleet.environments.session import Session
from omnifleet.environments.task import Task
from omnifleet.errors import OmnifleetError, Reason


class Environment(ABC):
    """Made once a process with the recipe's `params` as keyword arguments; `run` is then called for many episodes at once.

    State of an episode belongs into `run`, never on `self`. Code that blocks belongs into `asyncio.to_thread`.
    """

    @abstractmethod
    async def run(self, session: Session) -> Outcome:
        """Play one episode. Raising anything is a crash of the environment, never a reward."""

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """Tasks of its own; unneeded where a recipe names a data set. size: None = as many as there are."""
        raise OmnifleetError(
            Reason.INVALID_CONFIG,
            f"{type(self).__name__} brings no tasks: name a data set",
            knob="data.train.dataset",
        )


def load_environment(path: str, params: Mapping[str, Any]) -> Environment:
    """The environment at `module:Class`. Raises INVALID_CONFIG with what went wrong."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise _refused(path, "it must be module:Class")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise _refused(path, f"{error}; is it on the Python path?") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise _refused(path, f"{module} has no Environment of that name")
    try:
        return found(**params)
    except (TypeError, ValueError) as error:
        raise _refused(path, f"params {dict(params)}: {error}") from error


def _refused(path: str, why: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.INVALID_CONFIG, f"environment {path!r}: {why}", knob="data.train.environment"
    )
