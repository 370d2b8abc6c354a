"""What every service answers when it is asked how it is."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.wire import common_pb2
from omnifleet.wire.codec import counters_from_wire


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The same for every service: state, uptime in seconds, counters and facts."""

    service: str
    version: str
    instance: str
    uptime_s: float
    state: str
    counters: dict[str, float]
    facts: dict[str, str]


def status_from_wire(m: common_pb2.ServiceStatus) -> ServiceStatus:
    """A message as a status."""
    counters = counters_from_wire(m.counters)
    return ServiceStatus(m.service, m.version, m.instance, m.uptime_s, m.state, counters, dict(m.facts))
