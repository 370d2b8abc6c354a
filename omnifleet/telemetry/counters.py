"""Counters and gauges of one service: kept once, read by Status, by heartbeats and by Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Counters(Collector):
    """name -> number. Counters only grow; gauges are functions read when somebody looks. Single-threaded by contract."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._counts: dict[str, float] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Grow a counter; it starts at 0."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Register a gauge."""
        self._gauges[name] = read

    def expose(self, collector: Collector) -> None:
        """Show another collector's families in the same exposition."""
        self._registry.register(collector)

    def include(self, collector: Collector) -> None:
        """Let Prometheus also scrape what `collector` gives; Status and heartbeats do not see it."""
        self._registry.register(collector)

    def count(self, name: str) -> float:
        """Value of a counter, 0 if it never grew."""
        return self._counts.get(name, 0.0)

    def snapshot(self) -> dict[str, float]:
        """All counters and gauges now."""
        return {**self._counts, **{name: read() for name, read in self._gauges.items()}}

    def collect(self) -> Iterator[Metric]:
        """Prometheus families, named `omnifleet_<service>_<name>`."""
        prefix = f"omnifleet_{self._service}_"
        for name, value in self._counts.items():
            yield CounterMetricFamily(prefix + name, name.replace("_", " "), value=value)
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(prefix + name, name.replace("_", " "), value=read())

    def describe(self) -> list[Metric]:
        """Nothing is known before it is counted."""
        return []

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
