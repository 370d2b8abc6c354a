"""Which checkpoints stay: the newest, and the best by a metric. Source: NeMo RL's union rule (utils/checkpoint.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """latest: newest checkpoints that stay (at least 1). best: best ones by their metric that stay too (0 = none).

    higher_is_better: of the metric; a checkpoint without one ranks last, of equals the later step is better.
    """

    latest: int = 1
    best: int = 0
    higher_is_better: bool = True

    def keeps(self, metrics: Iterable[tuple[int, float | None]]) -> set[int]:
        """Steps that stay, of (step, metric) pairs."""
        found = sorted(metrics)
        newest = {step for step, _ in found[-max(self.latest, 1) :]}
        best = sorted(found, key=self._rank, reverse=True)[: self.best]
        return newest | {step for step, _ in best}

    def _rank(self, entry: tuple[int, float | None]) -> tuple[float, int]:
        step, metric = entry
        if metric is None or metric != metric:
            return (float("-inf"), step)
        return (metric if self.higher_is_better else -metric, step)
