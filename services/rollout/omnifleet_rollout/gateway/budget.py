"""How many samples of a run may still be started: the trainer's staleness budget, as it announced it. Pure; no clock."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.errors import Reason, retryable

_SHORTEST_S, _LONGEST_S = 0.25, 60.0


@dataclass(slots=True)
class _Budget:
    left: int
    set_at: float
    every_s: float


class Budgets:
    """run -> budget; a run without one is not limited by it. Times in seconds of any clock that does not jump."""

    def __init__(self) -> None:
        self._runs: dict[str, _Budget] = {}

    def set(self, run: str, samples: int, now: float) -> int:
        """Replace a run's budget; what was left of the last one. Its pace is how long the last one stood."""
        last = self._runs.get(run)
        every = now - last.set_at if last else _SHORTEST_S
        self._runs[run] = _Budget(samples, now, every)
        return last.left if last else 0

    def take(self, run: str, samples: int, now: float) -> None:
        """Start samples. Raises OVERLOADED with the time until the next budget may be expected."""
        budget = self._runs.get(run)
        if budget is None:
            return
        if samples > budget.left:
            wait = min(max(budget.set_at + budget.every_s - now, _SHORTEST_S), _LONGEST_S)
            raise retryable(
                Reason.OVERLOADED,
                f"run {run or 'default'} may start {budget.left} more samples before the next weights, not {samples}: "
                "what is generated now would be too old to train on",
                knob="trainer.max_staleness",
                retry_after_ms=int(1000 * wait),
            )
        budget.left -= samples

    def give_back(self, run: str, samples: int) -> None:
        """Samples that were started came to nothing."""
        if run in self._runs:
            self._runs[run].left += samples
