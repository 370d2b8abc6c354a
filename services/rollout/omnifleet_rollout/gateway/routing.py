"""Placement: sticky, least loaded, with media affinity, within bounds. Pure: no IO, no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WorkerState

_DIGESTS_PER_WORKER = 16_384
_RETRY_MS = 250  # advice while a queue is full; a slot frees up about as fast as a short reply ends


@dataclass(slots=True)
class Load:
    """What the gateway has on one worker: samples outstanding, and digests seen, newest last."""

    samples: int = 0
    seen: OrderedDict[str, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement looks at. session: "" = none. weight: samples that will follow it to the same worker."""

    run: str
    session: str = ""
    digests: tuple[str, ...] = ()
    weight: int = 1


class Homes(Protocol):
    """Where sessions live."""

    def home(self, run: str, session: str) -> str:
        """The worker of a session, "" if it has none."""
        ...

    def stick(self, run: str, session: str, worker: str) -> None:
        """From now on the session's worker is `worker`."""
        ...


class Router:
    """Chooses workers and counts what they hold. Bounds: samples a worker (running + queue) and samples a run."""

    def __init__(self, *, queue_per_worker: int, queue_per_run: int, homes: Homes) -> None:
        self._homes = homes
        self._queue_per_worker = queue_per_worker
        self._queue_per_run = queue_per_run
        self._loads: dict[str, Load] = {}
        self._runs: Counter[str] = Counter()

    # ------------------------------------------------------------------ runs

    def admit(self, run: str, samples: int, quota: int = 0) -> None:
        """Count a request of a run. Raises OVERLOADED while its bound leaves no room, LIMIT_EXCEEDED for ever."""
        bound = quota or self._queue_per_run
        knob = "fleet assign --quota" if quota else "gateway.queue_per_run"
        if samples > bound:
            raise OmnifleetError(Reason.LIMIT_EXCEEDED, f"n {samples} > {bound} samples of a run", knob=knob)
        if self._runs[run] + samples > bound:
            raise retryable(
                Reason.OVERLOADED,
                f"run {run or 'default'} has {self._runs[run]} samples in the gateway, {samples} more exceed {bound}",
                knob=knob,
                retry_after_ms=_RETRY_MS,
            )
        self._runs[run] += samples

    def dismiss(self, run: str, samples: int) -> None:
        """Samples of a run have ended."""
        self._runs[run] -= samples
        if self._runs[run] <= 0:
            del self._runs[run]

    def held(self, run: str) -> int:
        """Samples of a run in the gateway."""
        return self._runs[run]

    # ------------------------------------------------------------------ workers

    def place(self, ask: Ask, workers: Sequence[WorkerView], prefer: str = "") -> str:
        """The worker for one sample; `workers` are those that may serve it.

        prefer: take this one while it has room (samples of one request stay together). A session stays with its
        worker while that is READY or CORDONED; else the best READY one becomes its worker. Raises OVERLOADED if the
        session's worker, or every worker, is full. `workers` must hold the session's worker or a READY one.
        """
        home = next((w for w in workers if w.id == self.home(ask)), None)
        if home is not None:
            return self._with_room([home])[0].id
        fresh = self._with_room([w for w in workers if w.state is WorkerState.READY])
        chosen = prefer if prefer in {w.id for w in fresh} else self._best(ask, fresh)
        if ask.session:
            self._homes.stick(ask.run, ask.session, chosen)
        return chosen

    def take(self, worker: str, digests: Iterable[str] = ()) -> None:
        """One sample goes to `worker`."""
        load = self._load(worker)
        load.samples += 1
        for digest in digests:
            load.seen[digest] = None
            load.seen.move_to_end(digest)
        while len(load.seen) > _DIGESTS_PER_WORKER:
            load.seen.popitem(last=False)

    def give_back(self, worker: str) -> None:
        """One sample has left `worker`."""
        if worker in self._loads:
            self._loads[worker].samples -= 1

    def forget(self, living: Iterable[str]) -> None:
        """Drop what is known of workers that are gone and hold nothing."""
        keep = set(living)
        self._loads = {id: load for id, load in self._loads.items() if id in keep or load.samples > 0}

    def samples(self, worker: str) -> int:
        """Samples that the gateway has on a worker."""
        return self._loads[worker].samples if worker in self._loads else 0

    def home(self, ask: Ask) -> str:
        """The worker of the session, "" if it has none."""
        return self._homes.home(ask.run, ask.session) if ask.session else ""

    def _best(self, ask: Ask, workers: Sequence[WorkerView]) -> str:
        """Within one request of the least load: who saw most of the media, then who has least."""
        least = min(self._share(w) for w in workers)
        close = [w for w in workers if self._share(w) <= least + ask.weight / max(1, w.max_running)]
        wanted = set(ask.digests)
        best = min(close, key=lambda w: (-len(wanted & self._load(w.id).seen.keys()), self._share(w), w.id))
        return best.id

    def _share(self, worker: WorkerView) -> float:
        return self._load(worker.id).samples / max(1, worker.max_running)

    def _with_room(self, workers: Sequence[WorkerView]) -> list[WorkerView]:
        room = [w for w in workers if self._load(w.id).samples < w.max_running + self._queue_per_worker]
        if not room:
            names = ", ".join(f"{w.id} holds {self.samples(w.id)}" for w in workers)
            raise retryable(
                Reason.OVERLOADED,
                f"every queue is full: {names}",
                knob="gateway.queue_per_worker",
                retry_after_ms=_RETRY_MS,
            )
        return room

    def _load(self, worker: str) -> Load:
        return self._loads.setdefault(worker, Load())
