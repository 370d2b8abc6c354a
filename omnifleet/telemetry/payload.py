"""Payload metrics: how many bytes and references of media cross a boundary, and how many had to move for it.

logical: every reference counts. physical: only what was not there yet on the far side. serialized: bytes of the
messages, taken where gRPC has them anyway (omnifleet/wire/counting.py), so that nothing is serialised to be measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class _Boundary:
    logical_bytes: int = 0
    physical_bytes: int = 0
    serialized: int = 0
    logical_segments: int = 0
    physical_segments: int = 0
    calls: int = 0
    keys: dict[str, list[int]] = field(default_factory=dict)
    """[physical, logical] segments of each kind of content."""

    @property
    def saved(self) -> int:
        return max(0, self.logical_bytes - self.physical_bytes)

    @property
    def ratio(self) -> float:
        return self.physical_bytes / self.logical_bytes if self.logical_bytes else 1.0


class PayloadMeter(Collector):
    """Totals by boundary; every method may be called from any thread."""

    def __init__(self, service: str) -> None:
        """service: prefix of the Prometheus names, `omnifleet_<service>_payload_...`."""
        self._service = service
        self._lock = threading.Lock()
        self._boundaries: dict[str, _Boundary] = {}

    def moved(
        self,
        boundary: str,
        *,
        logical_bytes: int,
        physical_bytes: int,
        logical_segments: int = 1,
        physical_segments: int = 1,
        key: str = "",
    ) -> None:
        """One hand-over: bytes and pieces that it refers to, and those that had to move for it.

        key: what the pieces are (`frame`, `track`, `segment`), where a boundary has several; they are then counted apart too.
        """
        with self._lock:
            at = self._boundaries.setdefault(boundary, _Boundary())
            at.logical_bytes += logical_bytes
            at.physical_bytes += physical_bytes
            at.logical_segments += logical_segments
            at.physical_segments += physical_segments
            at.calls += 1
            if key:
                pieces = at.keys.setdefault(key, [0, 0])
                pieces[0] += physical_segments
                pieces[1] += logical_segments

    def serialized(self, boundary: str, size: int) -> None:
        """One message of `size` bytes on the wire."""
        with self._lock:
            self._boundaries.setdefault(boundary, _Boundary()).serialized += size

    def snapshot(self) -> dict[str, float]:
        """`payload_bytes/B/{serialized,serialized_mean_per_call,physical_media,logical_media,estimated_saved}`,
        `payload_counts/B/{physical_segments,logical_segments,calls}`, `payload_counts/B/KEY/{physical,logical}_segments`
        and `payload_ratio/B/physical_to_logical` (1.0 without media)."""
        with self._lock:
            return {
                name: value for b, at in sorted(self._boundaries.items()) for name, value in _named(b, at)
            }

    def collect(self) -> Iterator[Metric]:
        """Prometheus families with the labels `boundary` and `kind`; pieces of one key have it as a label too."""
        prefix = f"omnifleet_{self._service}_payload_"
        sizes = CounterMetricFamily(prefix + "bytes", "payload bytes", labels=("boundary", "kind"))
        counts = CounterMetricFamily(prefix + "counts", "payload pieces", labels=("boundary", "kind"))
        ratios = GaugeMetricFamily(
            prefix + "physical_to_logical", "bytes moved a byte referred to", labels=("boundary",)
        )
        pieces = CounterMetricFamily(
            prefix + "segments", "payload pieces of one key", labels=("boundary", "key", "kind")
        )
        means = GaugeMetricFamily(
            prefix + "serialized_mean_per_call", "bytes of messages a call", labels=("boundary",)
        )
        families = {"payload_bytes": sizes, "payload_counts": counts}
        for name, value in self.snapshot().items():
            family, boundary, *key, kind = name.split("/")
            if key:
                pieces.add_metric((boundary, *key, kind), value)
            elif kind == "serialized_mean_per_call":
                means.add_metric((boundary,), value)
            elif family in families:
                families[family].add_metric((boundary, kind), value)
            else:
                ratios.add_metric((boundary,), value)
        yield from (sizes, counts, pieces, means, ratios)

    def describe(self) -> list[Metric]:
        """Nothing is known before it is counted."""
        return []


def _named(boundary: str, at: _Boundary) -> Iterator[tuple[str, float]]:
    yield f"payload_bytes/{boundary}/serialized", at.serialized
    if at.calls:
        yield f"payload_bytes/{boundary}/serialized_mean_per_call", at.serialized / at.calls
    yield f"payload_bytes/{boundary}/physical_media", at.physical_bytes
    yield f"payload_bytes/{boundary}/logical_media", at.logical_bytes
    yield f"payload_bytes/{boundary}/estimated_saved", at.saved
    yield f"payload_counts/{boundary}/physical_segments", at.physical_segments
    yield f"payload_counts/{boundary}/logical_segments", at.logical_segments
    yield f"payload_counts/{boundary}/calls", at.calls
    for key, (physical, logical) in sorted(at.keys.items()):
        yield f"payload_counts/{boundary}/{key}/physical_segments", physical
        yield f"payload_counts/{boundary}/{key}/logical_segments", logical
    yield f"payload_ratio/{boundary}/physical_to_logical", at.ratio
