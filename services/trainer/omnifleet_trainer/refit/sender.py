"""Publishes weights to the fleet, whatever they travel by.

The property it works for: a worker that serves holds exactly one version that was verified whole. The worker keeps it;
the sender never assumes that a step succeeded, and a worker whose step failed is simply one that is behind.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.refit import Commit
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion, WorkerState
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.catching_up import CatchingUp, reachable
from omnifleet_trainer.refit.delivery import Delivery
from omnifleet_trainer.refit.guard import Guard
from omnifleet_trainer.refit.watch import Watch


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What a publish did. seconds: from the first tensor to the last commit; pack_seconds: until the file was there.

    bytes: of the largest file that a worker read, not times workers. gate_seconds: the longest; in_flight: samples
    running at the gates, summed.
    ok: ids of workers at the version; failed: id -> why; behind: ids of newcomers and of workers that are being
    brought up already. `keep_up` brings the latter two there.
    """

    version: WeightVersion
    seconds: float
    pack_seconds: float
    bytes: int
    gate_seconds: float
    in_flight: int
    ok: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    behind: tuple[str, ...] = ()


class RefitSender(ABC):
    """Sends one lineage of one run. `publish` in order, `keep_up` beside it.

    What stands for a version in the methods below is a transport's own: files, or a snapshot on a device.

    timeout_s: deadline of a worker's stage and of its commit, each. rolling: commit worker after worker, so that the
    others serve meanwhile; else all at once. max_lag: numbers that a serving worker may be behind the announced one.
    sparse: also make steps of the values that changed alone, and send those where they are smaller. without_shadow: "fence" or
    "refuse", what a worker does that serves and has no room for a shadow.
    """

    def __init__(
        self,
        fleet: FleetClient,
        secret: str,
        *,
        run: str,
        lineage: str,
        pool: str = "default",
        in_flight: InFlight = InFlight.RECOMPUTE,
        timeout_s: float = 60.0,
        rolling: bool = False,
        max_lag: int = 1,
        sparse: bool = True,
        without_shadow: str = "fence",
    ) -> None:
        self._fleet, self._run, self._lineage, self._pool = fleet, run, lineage, pool
        self._rolling, self._max_lag, self._sparse = rolling, max_lag, sparse
        self._fences, self._one_fenced = without_shadow == "fence", asyncio.Lock()
        self._delivery = Delivery(secret, in_flight, timeout_s)
        self._watch = Watch(self._delivery, self._before, self._restore)
        self._publishing = False
        self.catching_up = CatchingUp(
            self._delivery, self._watch, self._newest, self._announce, self._bring, self._publishes_to
        )

    @property
    def guard(self) -> Guard | None:
        """The canary, if there is one. Set it before the first publish."""
        return self._watch.guard

    @guard.setter
    def guard(self, guard: Guard | None) -> None:
        self._watch.guard = guard

    @property
    def version(self) -> WeightVersion | None:
        """The version published last."""
        newest = self._newest()
        return newest.version if newest else None

    async def publish(
        self,
        number: int,
        tensors: Iterator[tuple[str, Tensor]],
        changed: set[str],
        *,
        encoder_changed: bool,
        executor: Executor | None = None,
    ) -> RefitReport:
        """Make `tensors` (all of the model, by checkpoint name) version `number` of every worker that can be reached.

        changed: names that may differ from the version before; the others are sent once a lineage. encoder_changed:
        encoder outputs depend on tensors that changed. The tensors are read on `executor`, before anything is
        announced. Workers that fail are in the report and are left to `keep_up`. Raises OmnifleetError(CONFLICT)
        for a number below the last one, DISK_FULL, and what the registry raises; after that the same number may be
        published again, which sends the same bytes.
        """
        began = time.monotonic()
        version = WeightVersion(self._run, self._lineage, number)
        newest = self.version
        if newest is not None and number < newest.number:
            raise OmnifleetError(Reason.CONFLICT, f"{version} is behind {newest}")
        if newest is None or number > newest.number:
            self._take(await self._packed(version, tensors, changed, encoder_changed, executor))
        if self.guard is not None:
            await self.guard.look(number)
        packed = time.monotonic()
        self._publishing = True
        try:
            report = await self._announce_and_send(self._newest())
        finally:
            self._publishing = False
            self.catching_up.wake.set()
        return replace(report, seconds=time.monotonic() - began, pack_seconds=packed - began)

    def share(self, others: Any, names: Collection[str]) -> list[set[str]]:
        """Before a publish by a trainer of several ranks: which of these tensors each other rank is to keep and send.

        others: these ranks (`omnifleet_trainer.refit.share.Others`), None if there are none. Empty: nothing, the first
        rank sends all.
        """
        return []

    def rest(self) -> None:
        """The workers' engines sleep while the trainer has their devices: nobody is brought up until `go_on`."""
        self.catching_up.resting = True

    def go_on(self, bare: Collection[str]) -> None:
        """Workers can take weights again; those in `bare` (ids) dropped theirs and need everything."""
        for worker in bare:
            self._delivery.lost_weights(worker)
        self.catching_up.resting = False
        self.catching_up.wake.set()

    async def keep_up(self) -> None:
        """Watch the fleet and bring each worker that is not at the current version there. Runs until cancelled."""
        await self.catching_up.run(self._fleet, self._pool)

    async def close(self) -> None:
        """Stop catch-ups and free what versions take. Idempotent."""
        try:
            await self.catching_up.cancel()
        finally:
            self._forget()

    async def _announce(self, version: WeightVersion) -> None:
        await self._fleet.announce_version(version, pool=self._pool, max_lag=self._max_lag)

    def _may_fence(self, worker: WorkerView) -> bool:
        """True if a worker may be fenced for want of a shadow; one that is fenced has nothing to lose."""
        return self._fences or worker.state is WorkerState.STALE

    def _publishes_to(self, worker: WorkerView) -> bool:
        release = self._newest()
        return self._publishing and release is not None and self._takes(worker, release)

    async def _announce_and_send(self, release: Any) -> RefitReport:
        await self._announce(release.version)
        workers = reachable(await self._fleet.list(self._pool))
        ready = [
            worker
            for worker in workers
            if worker.id not in self.catching_up.behind and self._takes(worker, release)
        ]
        commits, failed = await self._send_all(release, ready)
        there = [worker for worker in ready if worker.id in commits]
        told = await asyncio.gather(*(self._watch.over(worker, release.version) for worker in there))
        failed |= {worker.id: why for worker, why in zip(there, told, strict=True) if why}
        return RefitReport(
            version=release.version,
            seconds=0.0,
            pack_seconds=0.0,
            bytes=self._size(release),
            gate_seconds=max((commit.gate_seconds for commit in commits.values()), default=0.0),
            in_flight=sum(commit.in_flight for commit in commits.values()),
            ok=tuple(sorted(commits.keys() - failed.keys())),
            failed=failed,
            behind=tuple(sorted({worker.id for worker in workers} - {worker.id for worker in ready})),
        )

    async def _packed(
        self,
        version: WeightVersion,
        tensors: Iterator[tuple[str, Tensor]],
        changed: set[str],
        encoder_changed: bool,
        executor: Executor | None,
    ) -> Any:
        future = asyncio.get_running_loop().run_in_executor(
            executor, lambda: self._pack(version, tensors, changed, encoder_changed)
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._discard)
            raise

    def _discard(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._drop(future.result())

    @abstractmethod
    def _pack(
        self,
        version: WeightVersion,
        tensors: Iterator[tuple[str, Tensor]],
        changed: set[str],
        encoder_changed: bool,
    ) -> Any:
        """Make what stands for a version. Blocks."""

    @abstractmethod
    def _take(self, release: Any) -> None:
        """A version was packed: it is the newest now."""

    @abstractmethod
    def _drop(self, release: Any) -> None:
        """A version was packed for a publish that is gone."""

    @abstractmethod
    def _newest(self) -> Any:
        """What stands for the version published last, or None."""

    @abstractmethod
    def _before(self) -> Any:
        """What stands for the version before the newest, or None. It is kept if a canary may tell against the newest."""

    @abstractmethod
    def _size(self, release: Any) -> int:
        """Bytes that a publish sent."""

    @abstractmethod
    def _takes(self, worker: WorkerView, release: Any) -> bool:
        """True if a publish may send to this worker."""

    @abstractmethod
    async def _send_all(
        self, release: Any, workers: list[WorkerView]
    ) -> tuple[dict[str, Commit], dict[str, str]]:
        """Stage on all in parallel, then commit what is staged; (id -> commit, id -> why not)."""

    @abstractmethod
    async def _bring(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Bring one worker to a version, alone. Ask it first: a reply that was lost may have left it whole."""

    @abstractmethod
    async def _restore(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Put a quarantined worker back to an older version, whole."""

    @abstractmethod
    def _forget(self) -> None:
        """Free what versions take. Idempotent."""
