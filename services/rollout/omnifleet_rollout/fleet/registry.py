"""The registry as a state machine: reports, silence and operator verbs in, states out. No IO; the clock is injected."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from omnifleet.client.fleet import FleetView, Membership, Orders, Verb, WorkerView
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_rollout.fleet.member import Member, Pool, settle

DEFAULT_POOL = "default"
_REMEMBERED = 1000  # gone workers whose ids are still refused by name


class Registry:
    """All workers of all pools. Times in seconds of `clock`, which must not jump (time.monotonic).

    `revision` grows with every change of a state, version, pin or pool; loads do not count.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        heartbeat_s: float,
        suspect_after_s: float,
        dead_after_s: float,
        hung_after_s: float = math.inf,
        max_workers: int = 1 << 16,
    ) -> None:
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._hung_after_s = hung_after_s
        self._max_workers = max_workers
        self._members: dict[str, Member] = {}
        self._pools: dict[str, Pool] = {}
        self._looked = clock()
        self.revision = 0

    # ------------------------------------------------------------------ workers

    def join(self, report: WorkerView) -> Membership:
        """Register a process. Raises CONFLICT if its id is gone or another process's, INVALID_REQUEST if empty."""
        if not report.id or not report.grpc_address:
            raise invalid("a worker joins with an id and a grpc_address")
        known = self._members.get(report.id)
        if known is not None and (known.end is not None or known.view.instance != report.instance):
            what = "is gone" if known.end is not None else "belongs to another process"
            raise OmnifleetError(
                Reason.CONFLICT,
                f"worker id {report.id} {what}; an id is never used twice",
                knob="worker name",
            )
        now = self._clock()
        if known is None:
            known = Member(report, report.state, "", joined=now, heard=now)
            self._members[report.id] = known
        known.lease_id = uuid.uuid4().hex
        pool = self._pool(report.pool)
        self._take(known, report)
        self._changed()
        self._forget_oldest()
        return Membership(known.lease_id, self._heartbeat_s, pool.target)

    def heartbeat(self, lease_id: str, report: WorkerView) -> Orders:
        """Take a report. An unknown lease is asked to rejoin; a worker that is gone stays gone."""
        member = self._members.get(report.id)
        if member is not None and member.end is not None:
            return Orders(member.end, None, rejoin=False, note=member.reason)
        if member is None or member.lease_id != lease_id or member.view.instance != report.instance:
            return Orders(None, None, rejoin=True)
        self._take(member, report)
        target = self._pool(member.view.pool).target
        return Orders(member.state, target, rejoin=False, note=member.view.note)

    def leave(self, lease_id: str, reason: str) -> None:
        """The worker goes on purpose; an unknown lease is harmless."""
        for member in self._members.values():
            if member.lease_id == lease_id and member.end is None:
                member.left = True
                self._end(member, WorkerState.RETIRED, reason or member.reason or "left")

    def lost(self, worker: str, note: str) -> None:
        """A call to the worker broke: it takes nothing new until its next heartbeat."""
        member = self._members.get(worker)
        if member is not None and member.end is None and not member.silent:
            member.silent = note
            self._settle(member)

    def tick(self) -> list[WorkerView]:
        """Look for silent workers and overdue drains. Time in which nobody looked is not silence.

        Returns SUSPECT workers that are silent for so long that they may be dead. Silence alone does not tell a dead
        worker from a slow one: ask its process, then say `bury` or `spare`.
        """
        now = self._clock()
        unseen = max(0.0, now - self._looked - self._heartbeat_s)
        self._looked = now
        doubtful = []
        for member in self._alive():
            member.heard = min(now, member.heard + unseen)
            silence = now - member.heard
            if silence > self._hung_after_s:
                self._end(member, WorkerState.DEAD, f"its process lives but was silent for {silence:.1f} s")
            elif member.drain_by is not None and now > member.drain_by:
                self._end(member, WorkerState.RETIRED, "drain deadline passed")
            elif silence > self._suspect_after_s and not member.silent:
                member.silent = "missed heartbeats"
                self._settle(member)
            if member.end is None and now - max(member.heard, member.spared) > self._dead_after_s:
                doubtful.append(member.view)
        return doubtful

    def spare(self, worker: str) -> None:
        """The process of a silent worker answers: it is slow, not dead. It stays SUSPECT and is doubted again later."""
        member = self._members.get(worker)
        if member is not None and member.end is None and member.silent:
            member.spared = self._clock()
            member.silent = f"silent for {self.silence(worker):.0f} s, but its process answers"
            self._settle(member)

    def bury(self, worker: str) -> None:
        """The process of a silent worker does not answer: DEAD, unless it was heard of meanwhile."""
        member = self._members.get(worker)
        if member is None or member.end is not None or self.silence(worker) <= self._dead_after_s:
            return
        self._end(
            member,
            WorkerState.DEAD,
            f"silent for {self.silence(worker):.1f} s, and its process does not answer",
        )

    def _take(self, member: Member, report: WorkerView) -> None:
        moved = report.version != member.view.version
        member.heard, member.silent, member.report = self._clock(), "", report.state
        member.said = "" if report.state is WorkerState.DRAINING else report.note
        if report.state is WorkerState.DRAINING and member.intent is not WorkerState.DRAINING:
            member.intent, member.reason = WorkerState.DRAINING, report.note or "the worker is stopping"
        member.view = replace(
            report,
            pool=report.pool or DEFAULT_POOL,
            state=member.view.state,
            note=member.view.note,
            pinned=member.view.pinned,
        )
        if not self._settle(member) and moved:
            self._changed()

    # ------------------------------------------------------------------ operators

    def act(self, verb: Verb, worker: str, reason: str = "", drain_s: float = 0.0) -> WorkerView:
        """Do `verb`. Raises NOT_FOUND for an unknown or gone worker, CONFLICT where the verb does not fit its state."""
        member = self._find(worker)
        match verb:
            case Verb.DRAIN:
                self._drain(member, reason or "drained by operator")
                member.drain_by = self._clock() + drain_s if drain_s > 0 else None
            case Verb.CORDON:
                self._not_draining(member, verb)
                member.intent, member.reason = WorkerState.CORDONED, reason or "cordoned by operator"
            case Verb.UNCORDON:
                self._not_draining(member, verb)
                member.intent, member.reason = None, ""
            case Verb.PIN | Verb.UNPIN:
                member.view = replace(member.view, pinned=verb is Verb.PIN)
                self._changed()
            case Verb.RETIRE:
                self._end(member, WorkerState.RETIRED, reason or "retired by operator")
        self._settle(member)
        return member.view

    def scale(self, pool_name: str, desired: int, reason: str = "") -> tuple[int, list[str]]:
        """Set `desired`; too many workers: drain unpinned ones, least loaded first, then newest.

        Returns (desired, drained ids). Missing workers are the launcher's to start. Raises LIMIT_EXCEEDED.
        """
        if desired > self._max_workers:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"desired {desired} > max_workers {self._max_workers}",
                knob="rollout.max_workers",
            )
        pool = self._pool(pool_name)
        pool.desired = desired
        here = [m for m in self._alive() if m.counts and m.view.pool == pool.name]
        movable = sorted(
            (m for m in here if not m.view.pinned),
            key=lambda m: (m.state is WorkerState.READY, m.view.running + m.view.waiting, -m.joined, m.id),
        )
        victims = movable[: max(0, len(here) - desired)]
        for member in victims:
            self._drain(member, reason or f"scaled to {desired}")
            self._settle(member)
        self._changed()
        return desired, [member.id for member in victims]

    def assign(self, pool_name: str, run: str, quota: int, priority: int) -> None:
        """Give a pool to one run, "" = to all."""
        pool = self._pool(pool_name)
        pool.run, pool.quota, pool.priority = run, quota, priority
        self._changed()

    def announce(self, pool_name: str, version: WeightVersion, max_lag: int) -> int:
        """Set the weights that a pool must have. Raises CONFLICT for a lower number in the same lineage."""
        pool = self._pool(pool_name)
        if pool.target and pool.target.same_lineage(version) and version.number < pool.target.number:
            raise OmnifleetError(
                Reason.CONFLICT,
                f"version {version} is behind the announced {pool.target}; a rollback starts a new lineage",
                current_version=pool.target,
            )
        if (pool.target, pool.max_lag) != (version, max_lag):
            pool.target, pool.max_lag = version, max_lag
            for member in self._alive():
                if member.view.pool == pool.name:
                    self._settle(member)
            self._changed()
        return self.revision

    def forget_targets(self) -> None:
        """No pool must have any weights: whoever announced them is gone, and nobody is left to bring them."""
        for pool in self._pools.values():
            pool.target, pool.max_lag = None, 0
        self._changed()

    def want(self, pool_name: str, desired: int) -> None:
        """Set `desired` of a pool that has none yet; drains nobody."""
        if pool_name not in self._pools:
            self._pool(pool_name).desired = desired
            self._changed()

    def _drain(self, member: Member, reason: str) -> None:
        if member.intent is not WorkerState.DRAINING:
            member.intent, member.reason = WorkerState.DRAINING, reason

    def _not_draining(self, member: Member, verb: Verb) -> None:
        if member.intent is WorkerState.DRAINING:
            raise OmnifleetError(
                Reason.CONFLICT, f"worker {member.id} drains and will leave; it cannot be {verb}ed any more"
            )

    def _find(self, worker: str) -> Member:
        exact = self._members.get(worker)
        named = [exact] if exact else [m for m in self._alive() if m.id.rpartition("-")[0] == worker]
        if len(named) != 1 or named[0].end is not None:
            living = ", ".join(m.id for m in self._alive()) or "none"
            raise invalid(
                f"no single living worker is called {worker!r}; living: {living}", reason=Reason.NOT_FOUND
            )
        return named[0]

    # ------------------------------------------------------------------ looking

    def view(self, pool_name: str = "", *, include_gone: bool = False) -> FleetView:
        """A snapshot of one pool, or of all ("": `desired` is the sum, the target that of the only or default pool)."""
        pools = [self._pools[pool_name]] if pool_name in self._pools else []
        if not pool_name:
            pools = list(self._pools.values())
        names = {pool.name for pool in pools}
        workers = [
            member.view
            for member in self._members.values()
            if member.view.pool in names and (include_gone or member.end is None)
        ]
        main = self._pools.get(self.pool_name(pool_name))
        return FleetView(
            sorted(workers, key=lambda w: w.id),
            sum(pool.desired for pool in pools),
            main.target if main else None,
            self.revision,
        )

    def pool_name(self, given: str) -> str:
        """The pool that is meant: as given, else the only one there is, else `default`."""
        if given:
            return given
        return next(iter(self._pools)) if len(self._pools) == 1 else DEFAULT_POOL

    def pools_of(self, run: str) -> list[Pool]:
        """Pools that serve a run: those assigned to it, and those that serve all."""
        return [pool for pool in self._pools.values() if pool.run in ("", run)]

    def workers(self) -> list[WorkerView]:
        """Workers that are not gone."""
        return [member.view for member in self._alive()]

    def worker(self, id: str) -> WorkerView | None:
        """One worker, gone or not."""
        member = self._members.get(id)
        return member.view if member else None

    def given_up(self, id: str) -> bool:
        """True if nothing more is to be expected of the worker: unknown, DEAD, or RETIRED before it had left."""
        member = self._members.get(id)
        return member is None or (member.end is not None and not member.left)

    def silence(self, id: str) -> float:
        """Seconds since the last report of a worker."""
        return self._clock() - self._members[id].heard

    # ------------------------------------------------------------------ keeping

    def dump(self) -> tuple[list[Member], list[Pool], int]:
        """Everything that must survive a restart."""
        return list(self._members.values()), list(self._pools.values()), self.revision

    def restore(self, members: Iterable[Member], pools: Iterable[Pool], revision: int) -> None:
        """Take over what `dump` gave. Workers that lived are SUSPECT until they report again under their lease."""
        now = self._clock()
        self._pools = {pool.name: pool for pool in pools}
        for rank, member in enumerate(sorted(members, key=lambda m: m.joined)):
            member.joined, member.heard, member.spared = now + rank * 1e-6, now, 0.0
            member.drain_by = now + self._dead_after_s if member.drain_by is not None else None
            if member.end is None:
                member.silent = "the gateway restarted"
            self._members[member.id] = member
            settle(member, self._pool(member.view.pool))
        self.revision = revision + 1

    def _alive(self) -> list[Member]:
        return [member for member in self._members.values() if member.end is None]

    def _pool(self, name: str) -> Pool:
        return self._pools.setdefault(self.pool_name(name), Pool(self.pool_name(name)))

    def _end(self, member: Member, end: WorkerState, reason: str) -> None:
        member.end, member.reason = end, reason
        self._settle(member)

    def _settle(self, member: Member) -> bool:
        changed = settle(member, self._pool(member.view.pool))
        if changed:
            self._changed()
        return changed

    def _changed(self) -> None:
        self.revision += 1

    def _forget_oldest(self) -> None:
        gone = [member.id for member in self._members.values() if member.end is not None]
        for id in gone[: max(0, len(gone) - _REMEMBERED)]:
            del self._members[id]
