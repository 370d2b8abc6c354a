"""The port between a run's supervisor and whatever starts processes: this machine, or Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One service process. `resources`: "CPU" and "GPU" counts that a scheduler needs; `log`: file for its output."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    resources: dict[str, float] = field(default_factory=dict)


class Handle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Process id on its host."""
        ...

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        ...

    def stop(self, grace_s: float) -> None:
        """Ask it to end, then end it by force after `grace_s` seconds, with all that it started."""
        ...


class Launcher(Protocol):
    """Starts processes."""

    def start(self, spec: ProcessSpec) -> Handle:
        """Start `spec`; returns at once. Raises OmnifleetError if it cannot be started at all."""
        ...
