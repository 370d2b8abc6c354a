"""What was asked, made and refused: the service's counters, and the same by run."""

from __future__ import annotations

from collections import Counter, OrderedDict

from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.counters import Counters

_RUNS = 256  # accounts kept; the run that was quiet for longest goes first


class Accounts:
    """runs: run -> {requests, samples, tokens, samples_finished, samples_failed}."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.runs: OrderedDict[str, Counter[str]] = OrderedDict()

    def add(self, run: str, **amounts: int) -> None:
        """Grow the run's account and the service's counters of the same names."""
        account = self.runs.setdefault(run, Counter())
        self.runs.move_to_end(run)
        while len(self.runs) > _RUNS:
            self.runs.popitem(last=False)
        for name, amount in amounts.items():
            account[name] += amount
            self._counters.add(name, amount)

    def note(self, name: str) -> None:
        """Count an event that belongs to no run."""
        self._counters.add(name)

    def refuse(self, error: OmnifleetError) -> None:
        """Count a refusal by its reason."""
        self._counters.add(f"refusals_{error.reason}")
