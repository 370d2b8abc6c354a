"""What a sink is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.loop.journal import StepRecord


class Sink(Protocol):
    """Takes records of steps. Calls block and come from one thread at a time; OmnifleetError says what is wrong."""

    name: str

    def write(self, record: StepRecord) -> None:
        """Take the metrics of a step; a later record of the same step completes the earlier one."""
        ...

    def picture(self, step: int, path: Path) -> None:
        """Take a PNG that belongs to a step."""
        ...

    def close(self) -> None:
        """Flush. Idempotent."""
        ...


def library(module: str, *, extra: str) -> Any:
    """Import a sink's library. Raises UNSUPPORTED that names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"metrics.sinks has {extra!r}, but its library is not installed ({error.name} is missing): "
            f"pip install 'omnifleet-trainer[{extra}]'",
            knob="metrics.sinks",
        ) from error
