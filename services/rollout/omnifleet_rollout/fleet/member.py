"""One worker in the registry. Its state is not stored step by step: it follows from what is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omnifleet.client.fleet import WorkerView
from omnifleet.types import WeightVersion, WorkerState


@dataclass(slots=True)
class Pool:
    """What holds for all workers of a pool.

    desired: workers that the operator wants. target, max_lag: see `settle`. run: "" = serves all runs.
    quota: samples of the run at once, 0 = the gateway's limit. priority: of its requests, lower goes first.
    """

    name: str
    desired: int = 0
    target: WeightVersion | None = None
    max_lag: int = 0
    run: str = ""
    quota: int = 0
    priority: int = 0


@dataclass(slots=True)
class Member:
    """A worker: its last report, its lease and what operators want of it.

    joined, heard, spared, drain_by: seconds of the registry's clock; spared: when its process last answered in a silence.
    admitted: it reached the pool's weights and has not fallen behind since. served: it was admitted once.
    said: the worker's own words on its weights. silent: heartbeats are missing. intent: DRAINING or CORDONED.
    end: DEAD or RETIRED, for good. left: it went by itself, after its samples.
    """

    view: WorkerView
    report: WorkerState
    lease_id: str
    joined: float
    heard: float
    admitted: bool = False
    served: bool = False
    spared: float = 0.0
    silent: str = ""
    intent: WorkerState | None = None
    reason: str = ""
    drain_by: float | None = None
    end: WorkerState | None = None
    left: bool = False
    said: str = ""

    @property
    def id(self) -> str:
        """Unique per process."""
        return self.view.id

    @property
    def state(self) -> WorkerState:
        """As of the last `settle`."""
        return self.view.state

    @property
    def counts(self) -> bool:
        """True if the worker is part of the fleet that `desired` speaks of: neither gone nor on its way out."""
        return self.end is None and self.intent is not WorkerState.DRAINING


def settle(member: Member, pool: Pool) -> bool:
    """Derive state and note from what is known. Returns True if either changed.

    READY needs an engine that is up and whole, and, where the pool has a target, a worker that is `admitted`:
    exactly at the target once, and since then in its lineage and at most `max_lag` numbers behind. One that was put back
    to an older version, whole, is held to the same bound.
    """
    _admit(member, pool)
    state, note = _derive(member, pool)
    changed = (state, note) != (member.view.state, member.view.note)
    member.view = replace(member.view, state=state, note=note)
    return changed


def _admit(member: Member, pool: Pool) -> None:
    version, target = member.view.version, pool.target
    if member.report in (WorkerState.JOINING, WorkerState.STALE):
        member.admitted = False
    elif target is None or at(version, target):
        member.admitted = True
    elif member.admitted or (member.served and member.said):
        member.admitted = near(version, target, pool.max_lag)
    member.served = member.served or member.admitted


def _derive(member: Member, pool: Pool) -> tuple[WorkerState, str]:
    if member.end is not None:
        return member.end, member.reason
    if member.silent:
        return WorkerState.SUSPECT, member.silent
    if member.intent is WorkerState.DRAINING:
        return WorkerState.DRAINING, member.reason
    if member.report is WorkerState.JOINING:
        return WorkerState.JOINING, "engine is starting"
    if member.report is WorkerState.STALE:
        return WorkerState.STALE, member.said or "weights are not whole"
    if not member.admitted:
        state = WorkerState.STALE if member.served else WorkerState.CATCHING_UP
        return state, f"at {member.view.version or 'no version'}, needs {pool.target}"
    if member.intent is WorkerState.CORDONED:
        return WorkerState.CORDONED, member.reason
    return WorkerState.READY, member.said


def at(version: WeightVersion | None, target: WeightVersion) -> bool:
    """True if `version` is the target: same lineage, number and, where the target names one, manifest."""
    return (
        version is not None
        and version.same_lineage(target)
        and version.number == target.number
        and target.manifest_digest in ("", version.manifest_digest)
    )


def near(version: WeightVersion | None, target: WeightVersion, max_lag: int) -> bool:
    """True if `version` is the target, ahead of it, or at most `max_lag` numbers behind, in the same lineage."""
    if version is None or not version.same_lineage(target):
        return False
    if version.number == target.number:
        return at(version, target)
    return version.number >= target.number - max_lag
