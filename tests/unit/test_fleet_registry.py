"""The registry: no way to READY without the pool's weights, ids that never come back, drains, scale, restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omnifleet.client.fleet import Verb, WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_rollout.fleet.registry import Registry
from omnifleet_rollout.fleet.store import FleetStore

READY = WorkerState.READY


def v(number: int, lineage: str = "a", digest: str = "") -> WeightVersion:
    return WeightVersion("run", lineage, number, digest)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock) -> Registry:
    return Registry(clock, heartbeat_s=1, suspect_after_s=4, dead_after_s=12, hung_after_s=60, max_workers=8)


def pass_time(clock: Clock, registry: Registry, seconds: int, *, answers: bool = False) -> int:
    """Second by second, with a gateway that looks and asks; how often a process was asked."""
    asked = 0
    for _ in range(seconds):
        clock.now += 1
        for view in registry.tick():
            asked += 1
            (registry.spare if answers else registry.bury)(view.id)
    return asked


def report(
    id: str, version: WeightVersion | None = None, state: WorkerState = READY, running: int = 0
) -> WorkerView:
    return WorkerView(
        id=id, instance="i-" + id, grpc_address="h:1", state=state, version=version, running=running
    )


def state(registry: Registry, id: str) -> WorkerState:
    view = registry.worker(id)
    assert view is not None
    return view.state


def test_a_newcomer_serves_only_at_exactly_the_target() -> None:
    registry = make(Clock())
    registry.announce("", v(5, digest="d5"), max_lag=2)
    lease = registry.join(report("w-1", v(4))).lease_id
    assert state(registry, "w-1") is WorkerState.CATCHING_UP
    for version in (v(4), v(5), v(5, digest="other"), v(6), v(5, "b", "d5")):
        registry.heartbeat(lease, report("w-1", version))
        assert state(registry, "w-1") is WorkerState.CATCHING_UP, version
    orders = registry.heartbeat(lease, report("w-1", v(5, digest="d5")))
    assert orders.wanted is READY and orders.target_version == v(5, digest="d5")


def test_a_serving_worker_may_lag_by_max_lag_then_is_fenced_until_it_is_at_the_target() -> None:
    registry = make(Clock())
    registry.announce("", v(5), max_lag=1)
    lease = registry.join(report("w-1", v(5))).lease_id
    registry.announce("", v(6), max_lag=1)
    assert state(registry, "w-1") is READY
    registry.announce("", v(7), max_lag=1)
    assert state(registry, "w-1") is WorkerState.STALE
    registry.heartbeat(lease, report("w-1", v(6)))
    assert state(registry, "w-1") is WorkerState.STALE, (
        "within the lag, but it fell out and must be current again"
    )
    registry.heartbeat(lease, report("w-1", v(7)))
    assert state(registry, "w-1") is READY


def test_a_fenced_worker_serves_nothing_though_its_number_fits() -> None:
    registry = make(Clock())
    registry.announce("", v(5), max_lag=1)
    lease = registry.join(report("w-1", v(5))).lease_id
    registry.heartbeat(lease, report("w-1", v(5), WorkerState.STALE))
    assert state(registry, "w-1") is WorkerState.STALE
    registry.heartbeat(lease, report("w-1", v(5)))
    assert state(registry, "w-1") is READY


def test_a_new_lineage_fences_all_and_a_lower_number_is_refused() -> None:
    registry = make(Clock())
    registry.announce("", v(5), max_lag=9)
    registry.join(report("w-1", v(5)))
    with pytest.raises(OmnifleetError) as caught:
        registry.announce("", v(4), max_lag=9)
    assert caught.value.reason is Reason.CONFLICT
    registry.announce("", v(4, "b"), max_lag=9)
    assert state(registry, "w-1") is WorkerState.STALE


def test_without_a_target_an_engine_that_is_up_serves() -> None:
    registry = make(Clock())
    lease = registry.join(report("w-1", v(0), WorkerState.JOINING)).lease_id
    assert state(registry, "w-1") is WorkerState.JOINING
    registry.heartbeat(lease, report("w-1", v(0), WorkerState.CATCHING_UP))
    assert state(registry, "w-1") is READY


def test_silence_makes_suspect_then_dead_and_the_dead_stay_dead() -> None:
    clock = Clock()
    registry = make(clock)
    lease = registry.join(report("w-1")).lease_id
    assert pass_time(clock, registry, 5) == 0
    assert state(registry, "w-1") is WorkerState.SUSPECT
    registry.heartbeat(lease, report("w-1"))
    assert state(registry, "w-1") is READY
    assert pass_time(clock, registry, 13) == 1
    assert state(registry, "w-1") is WorkerState.DEAD
    assert registry.heartbeat(lease, report("w-1")).wanted is WorkerState.DEAD
    with pytest.raises(OmnifleetError):
        registry.join(report("w-1"))
    assert state(registry, "w-1") is WorkerState.DEAD


def test_a_gateway_that_was_stopped_does_not_declare_its_workers_dead() -> None:
    clock = Clock()
    registry = make(clock)
    registry.join(report("w-1"))
    clock.now += 3600
    registry.tick()
    assert state(registry, "w-1") is READY


def test_a_silent_worker_whose_process_answers_is_slow_not_dead() -> None:
    clock = Clock()
    registry = make(clock)
    lease = registry.join(report("w-1")).lease_id
    assert 1 <= pass_time(clock, registry, 40, answers=True) <= 4, (
        "asked once every dead_after_s, not every tick"
    )
    assert state(registry, "w-1") is WorkerState.SUSPECT
    view = registry.worker("w-1")
    assert view is not None and "its process answers" in view.note
    registry.heartbeat(lease, report("w-1"))
    assert state(registry, "w-1") is READY


def test_a_process_that_answers_but_never_reports_is_dead_in_the_end() -> None:
    clock = Clock()
    registry = make(clock)
    lease = registry.join(report("w-1")).lease_id
    pass_time(clock, registry, 62, answers=True)
    orders = registry.heartbeat(lease, report("w-1"))
    assert orders.wanted is WorkerState.DEAD and "its process lives" in orders.note


def test_a_heartbeat_that_comes_while_the_process_is_asked_wins() -> None:
    clock = Clock()
    registry = make(clock)
    lease = registry.join(report("w-1")).lease_id
    clock.now += 1
    for _ in range(13):
        clock.now += 1
        doubtful = registry.tick()
    assert [view.id for view in doubtful] == ["w-1"]
    registry.heartbeat(lease, report("w-1"))
    registry.bury("w-1")
    assert state(registry, "w-1") is READY


def test_a_gateway_that_looks_rarely_counts_only_the_time_in_which_it_looked() -> None:
    """Its event loop was held up 3 s at a time, as on a machine with too few cores: no heartbeat could get in."""
    clock = Clock()
    registry = make(clock)
    registry.join(report("w-1"))
    for _ in range(4):
        clock.now += 3
        assert registry.tick() == []
    assert state(registry, "w-1") is READY


def test_an_id_of_another_process_is_refused() -> None:
    registry = make(Clock())
    registry.join(report("w-1"))
    with pytest.raises(OmnifleetError) as caught:
        registry.join(WorkerView(id="w-1", instance="other", grpc_address="h:2"))
    assert caught.value.reason is Reason.CONFLICT


def test_drain_ends_by_leave_or_by_deadline_and_cannot_be_undone() -> None:
    clock = Clock()
    registry = make(clock)
    lease = registry.join(report("w-1")).lease_id
    registry.join(report("w-2"))
    assert registry.act(Verb.DRAIN, "w-1").state is WorkerState.DRAINING
    assert registry.heartbeat(lease, report("w-1")).wanted is WorkerState.DRAINING
    with pytest.raises(OmnifleetError) as caught:
        registry.act(Verb.UNCORDON, "w-1")
    assert caught.value.reason is Reason.CONFLICT
    registry.leave(lease, "drained")
    assert state(registry, "w-1") is WorkerState.RETIRED
    registry.act(Verb.DRAIN, "w-2", drain_s=2)
    clock.now += 2.5
    registry.tick()
    assert state(registry, "w-2") is WorkerState.RETIRED


def test_operators_may_say_a_name_that_one_living_worker_has() -> None:
    registry = make(Clock())
    registry.join(report("worker-0-abc"))
    registry.join(report("worker-1-abc"))
    assert registry.act(Verb.CORDON, "worker-0").state is WorkerState.CORDONED
    assert registry.act(Verb.UNCORDON, "worker-0").state is READY
    with pytest.raises(OmnifleetError) as caught:
        registry.act(Verb.CORDON, "worker-7")
    assert caught.value.reason is Reason.NOT_FOUND and "worker-1-abc" in caught.value.message


def test_scale_drains_unpinned_idle_newest_first_and_keeps_desired() -> None:
    clock = Clock()
    registry = make(clock)
    for id, running in (("a-1", 0), ("b-1", 5), ("c-1", 0), ("d-1", 0)):
        registry.join(report(id, running=running))
        clock.now += 1
    registry.act(Verb.PIN, "d-1")
    assert registry.scale("", 2) == (2, ["c-1", "a-1"])
    assert registry.scale("", 0) == (0, ["b-1"])
    assert registry.view().desired == 0 and state(registry, "d-1") is READY
    assert registry.scale("", 4) == (4, [])
    with pytest.raises(OmnifleetError) as caught:
        registry.scale("", 9)
    assert caught.value.knob == "rollout.max_workers"


def test_state_and_revision_survive_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    registry = make(clock)
    registry.announce("", v(3, digest="d"), max_lag=1)
    lease = registry.join(report("w-1", v(3, digest="d"))).lease_id
    registry.join(report("w-2", v(2)))
    registry.act(Verb.PIN, "w-1")
    registry.act(Verb.RETIRE, "w-2")
    registry.scale("", 1)
    store = FleetStore(tmp_path / "fleet.sqlite")
    store.save(registry)  # and no close: as after a kill

    again = make(clock)
    assert FleetStore(tmp_path / "fleet.sqlite").load(again)
    assert again.revision > registry.revision
    assert state(again, "w-1") is WorkerState.SUSPECT and state(again, "w-2") is WorkerState.RETIRED
    view = again.view()
    assert (view.desired, view.target_version) == (1, v(3, digest="d")) and view.workers[0].pinned
    assert again.heartbeat(lease, report("w-1", v(2))).wanted is READY, "served before, within the lag"
    with pytest.raises(OmnifleetError):
        again.join(report("w-2", v(3)))


class Fleet(RuleBasedStateMachine):
    """Any order of reports, silence, announcements and verbs."""

    ids = st.sampled_from(["a-1", "b-1", "c-1"])
    versions = st.builds(v, st.integers(0, 3), st.sampled_from("ab"), st.sampled_from(["", "x"]))

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.registry = make(self.clock)
        self.leases: dict[str, str] = {}
        self.was_at_target: set[str] = set()
        self.gone: set[str] = set()
        self.revision = -1
        self.lag = 0

    @rule(id=ids, version=versions, claim=st.sampled_from(list(WorkerState)))
    def speak(self, id: str, version: WeightVersion, claim: WorkerState) -> None:
        if id in self.leases:
            self.registry.heartbeat(self.leases[id], report(id, version, claim))
        elif id not in self.gone:
            self.leases[id] = self.registry.join(report(id, version, claim)).lease_id

    @rule(version=versions, lag=st.integers(0, 2))
    def announce(self, version: WeightVersion, lag: int) -> None:
        try:
            self.registry.announce("", version, lag)
            self.lag = lag
        except OmnifleetError as error:
            assert error.reason is Reason.CONFLICT

    @rule(id=ids, verb=st.sampled_from(list(Verb)))
    def act(self, id: str, verb: Verb) -> None:
        try:
            self.registry.act(verb, id)
        except OmnifleetError as error:
            assert error.reason in (Reason.CONFLICT, Reason.NOT_FOUND)

    @rule(desired=st.integers(0, 3))
    def scale(self, desired: int) -> None:
        self.registry.scale("", desired)

    @rule(seconds=st.sampled_from([1, 3]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        for view in self.registry.tick():
            self.registry.bury(view.id)

    @rule(id=ids)
    def lost(self, id: str) -> None:
        self.registry.lost(id, "call broke")

    @invariant()
    def only_the_target_opens_the_door(self) -> None:
        view = self.registry.view(include_gone=True)
        target = view.target_version
        for worker in view.workers:
            current = target is None or (
                worker.version is not None
                and worker.version.same_lineage(target)
                and worker.version.number == target.number
                and target.manifest_digest in ("", worker.version.manifest_digest)
            )
            if current:
                self.was_at_target.add(worker.id)
            if worker.state in (WorkerState.READY, WorkerState.CORDONED):
                assert worker.id in self.was_at_target
                if target is not None:
                    assert worker.version is not None and worker.version.same_lineage(target)
                    assert worker.version.number >= target.number - self.lag
            elif (
                worker.state in (WorkerState.JOINING, WorkerState.STALE, WorkerState.CATCHING_UP)
                and not current
            ):
                self.was_at_target.discard(worker.id)

    @invariant()
    def gone_is_for_ever_and_revisions_grow(self) -> None:
        view = self.registry.view(include_gone=True)
        gone = {w.id for w in view.workers if w.state.gone}
        assert self.gone <= gone
        self.gone = gone
        assert view.revision >= self.revision
        self.revision = view.revision


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
