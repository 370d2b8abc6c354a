"""How long engines had nothing to do: what a worker counts, and what the trainer makes of two reports."""

from __future__ import annotations

import pytest

from omnifleet.client.fleet import FleetView, WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import VersionBound, WeightVersion
from omnifleet_rollout.worker import gate as gate_module
from omnifleet_rollout.worker.gate import Flight, Gate
from omnifleet_rollout.worker.standing import Standing
from omnifleet_trainer.server.elsewhere import EngineIdleness


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


async def test_a_worker_counts_the_time_with_a_request_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(gate_module, "time", clock)
    gate = Gate(Standing("w-1", WeightVersion("r", "l", 0)), 4)
    first, second, bound = Flight("a", VersionBound()), Flight("b", VersionBound()), VersionBound()
    clock.now += 5
    assert gate.busy_s == 0
    await gate.enter([first], bound)
    clock.now += 2
    await gate.enter([second], bound)
    clock.now += 1
    gate.leave(first)
    gate.leave(first)
    clock.now += 4
    assert gate.busy_s == 7
    gate.leave(second)
    clock.now += 10
    assert gate.busy_s == 7
    await gate.enter([first], bound)
    clock.now += 1
    assert gate.busy_s == 8


class Registry:
    """Answers what a test puts there."""

    def __init__(self) -> None:
        self.workers: list[WorkerView] | None = None

    async def list(self, pool: str = "", *, include_gone: bool = False, deadline_s: float = 0.0) -> FleetView:
        if self.workers is None:
            raise retryable(Reason.UNAVAILABLE, "no gateway")
        return FleetView(self.workers, 0, None, 0)


def report(worker: str, at_s: float, busy_s: float) -> WorkerView:
    return WorkerView(id=worker, heartbeat_unix_ms=int(1000 * at_s), counters={"busy_seconds": busy_s})


async def test_the_share_is_that_of_all_workers_that_reported_twice() -> None:
    fleet = Registry()
    idleness = EngineIdleness(fleet, "default")
    assert await idleness.read() == {}
    fleet.workers = [report("a", 10, 4), report("b", 11, 0), WorkerView(id="joining")]
    assert await idleness.read() == {}
    fleet.workers = [report("a", 14, 8), report("b", 17, 1), report("new", 17, 3)]
    assert await idleness.read() == {"engine_idle_share": pytest.approx(1 - 5 / 10)}
    assert await idleness.read() == {}, "no worker has reported since"
    fleet.workers = None
    assert await idleness.read() == {}
    fleet.workers = [report("new", 27, 13)]
    assert await idleness.read() == {"engine_idle_share": 0.0}


async def test_what_the_registry_refuses_for_good_is_no_number_either() -> None:
    class Refusing(Registry):
        async def list(self, pool: str = "", **_: object) -> FleetView:
            raise OmnifleetError(Reason.FORBIDDEN, "no")

    assert await EngineIdleness(Refusing(), "").read() == {}
