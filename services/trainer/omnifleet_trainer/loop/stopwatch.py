"""Where the time of a step went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by activity since it was made."""

    def __init__(self, told: Callable[[str], None] = lambda activity: None) -> None:
        """told: of each activity as it begins."""
        self._told = told
        self._began = time.monotonic()
        self._spent: dict[str, float] = {}

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        """Add the time of the block to `activity`."""
        began = time.monotonic()
        self._told(activity)
        try:
            yield
        finally:
            self._spent[activity] = self._spent.get(activity, 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """step_s; NAME_s and NAME_share of each activity; idle_share: the policy neither trained nor sent weights."""
        total = max(time.monotonic() - self._began, 1e-9)
        busy = self._spent.get("train", 0.0) + self._spent.get("refit", 0.0)
        metrics = {"step_s": total, "idle_share": max(0.0, 1 - busy / total)}
        for activity, seconds in self._spent.items():
            metrics[f"{activity}_s"] = seconds
            metrics[f"{activity}_share"] = seconds / total
        return metrics
