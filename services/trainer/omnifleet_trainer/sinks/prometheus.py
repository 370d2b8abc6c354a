"""The newest step as Prometheus gauges, on the trainer's own /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omnifleet.telemetry.counters import Counters
from omnifleet_trainer.loop.journal import StepRecord

_OTHER = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink(Collector):
    """`omnifleet_trainer_step_NAME`; characters that Prometheus does not allow become _."""

    name = "prometheus"

    def __init__(self, counters: Counters) -> None:
        self._newest: dict[str, float] = {}
        counters.include(self)

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        self._newest = {f"step_{_OTHER.sub('_', name)}": value for name, value in record.metrics.items()}

    def picture(self, step: int, path: Path) -> None:
        """See `Sink`; Prometheus takes none."""

    def close(self) -> None:
        """See `Sink`."""

    def collect(self) -> Iterator[Metric]:
        """The families of the newest record."""
        for name, value in self._newest.items():
            yield GaugeMetricFamily(f"omnifleet_trainer_{name}", name.replace("_", " "), value=value)

    def describe(self) -> list[Metric]:
        """Nothing is known before a step."""
        return []
