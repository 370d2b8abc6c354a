"""Publishes weights to the fleet, and brings every worker that is behind to the current version alone.

The property it works for: a worker that serves holds exactly one version that was verified whole. The worker keeps it;
the sender never assumes that a step succeeded, and a worker whose step failed is simply one that is behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet.client.fleet import FleetClient, FleetView, WorkerView
from omnifleet.client.refit import Commit
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import InFlight, WeightVersion, WorkerState
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.delivery import Delivery
from omnifleet_trainer.refit.guard import Guard
from omnifleet_trainer.refit.release import Parcel, Release, add_step, first_release, next_release
from omnifleet_trainer.refit.sightings import sightings
from omnifleet_trainer.refit.transfer import Transfer, sweep
from omnifleet_trainer.refit.watch import Watch

log = logging.getLogger("omnifleet.trainer.refit")

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 64 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_CATCH_UPS_AT_ONCE = 4
_ATTEMPTS = 3
_DEAF = (
    WorkerState.JOINING,
    WorkerState.DRAINING,
    WorkerState.DEAD,
    WorkerState.RETIRED,
    WorkerState.SUSPECT,
)
"""States in which a worker is sent nothing: its engine is not up, or it will not serve."""


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


class RefitSender:
    """Sends one lineage of one run. Open with `RefitSender.open`; `publish` in order, `keep_up` beside it.

    timeout_s: deadline of a worker's stage and of its commit, each. rolling: commit worker after worker, so that the
    others serve meanwhile; else all at once. max_lag: numbers that a serving worker may be behind the announced one.
    sparse: also make steps of the values that changed alone, and send those where they are smaller.
    """

    def __init__(
        self,
        fleet: FleetClient,
        secret: str,
        *,
        run: str,
        lineage: str,
        pool: str = "default",
        shm_dir: Path = SHARED_MEMORY,
        in_flight: InFlight = InFlight.RECOMPUTE,
        timeout_s: float = 60.0,
        rolling: bool = False,
        max_lag: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        sparse: bool = True,
    ) -> None:
        self._fleet, self._run, self._lineage, self._pool = fleet, run, lineage, pool
        self._shm_dir, self._bucket_bytes, self._sparse = shm_dir, bucket_bytes, sparse
        self._rolling, self._max_lag = rolling, max_lag
        self._base: Transfer | None = None
        self._release: Release | None = None
        self._previous: Release | None = None
        """The version before, kept if there is a guard: a worker may have to be put back to it."""
        self._delivery = Delivery(secret, in_flight, timeout_s)
        self._composing = asyncio.Lock()
        self._behind: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_CATCH_UPS_AT_ONCE)
        self._wake = asyncio.Event()
        self._publishing = self._resting = False
        self._watch = Watch(self._delivery, self._before, self._restore)

    @staticmethod
    @asynccontextmanager
    async def open(
        fleet_address: str,
        secret: str,
        *,
        run: str,
        lineage: str,
        pool: str = "default",
        shm_dir: Path = SHARED_MEMORY,
        in_flight: InFlight = InFlight.RECOMPUTE,
        timeout_s: float = 60.0,
        rolling: bool = False,
        max_lag: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        sparse: bool = True,
    ) -> AsyncIterator[RefitSender]:
        """Connect to the fleet registry with a token of scope trainer; removes transfer files of dead senders."""
        for path in sweep(shm_dir):
            log.info("removed %s of a sender that is gone", path)
        async with FleetClient.open(fleet_address, secret) as fleet:
            sender = RefitSender(
                fleet,
                secret,
                run=run,
                lineage=lineage,
                pool=pool,
                shm_dir=shm_dir,
                in_flight=in_flight,
                timeout_s=timeout_s,
                rolling=rolling,
                max_lag=max_lag,
                bucket_bytes=bucket_bytes,
                sparse=sparse,
            )
            try:
                yield sender
            finally:
                await sender.close()

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
            self._wake.set()
        return replace(report, seconds=time.monotonic() - began, pack_seconds=packed - began)

    async def _announce_and_send(self, release: Any) -> RefitReport:
        await self._fleet.announce_version(release.version, pool=self._pool, max_lag=self._max_lag)
        workers = _reachable(await self._fleet.list(self._pool))
        ready = [
            worker for worker in workers if worker.id not in self._behind and self._takes(worker, release)
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

    def _pack(
        self,
        version: WeightVersion,
        tensors: Iterator[tuple[str, Tensor]],
        changed: set[str],
        encoder_changed: bool,
    ) -> Any:
        if self._base is None:
            return first_release(version, tensors, self._shm_dir, self._bucket_bytes)
        release = next_release(
            version, self._base, tensors, changed, encoder_changed, self._shm_dir, self._bucket_bytes
        )
        before = self._release
        if self._sparse and before is not None:
            try:
                add_step(release, before, self._shm_dir, self._bucket_bytes)
            except BaseException:
                release.retire()
                raise
        return release

    # What stands for a version is a `Release` here and another thing where weights do not travel in files: `Any`.

    def _newest(self) -> Any:
        """What stands for the version published last."""
        return self._release

    def _before(self) -> Any:
        """What stands for the version before the newest, if it is kept."""
        return self._previous

    def _take(self, release: Any) -> None:
        """A version was packed: it is the newest now. The one before is kept if a canary may tell against this one."""
        if self._previous is not None:
            self._previous.retire()
        if self._release is not None:
            self._release.drop_complete()
            if self.guard is None:
                self._release.retire()
        self._previous = self._release if self.guard is not None else None
        self._release, self._base = release, release.base

    def _drop(self, release: Any) -> None:
        """A version was packed for a publish that is gone. A base is not kept, so the next publish makes one."""
        release.retire()
        if release.delta is None:
            release.base.retire()

    def _size(self, release: Any) -> int:
        """Bytes of the largest file that was sent; of what would be, if none was."""
        return int(release.sent or (release.delta or release.base).size)

    def _discard(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._drop(future.result())

    async def _send_all(
        self, release: Any, workers: list[WorkerView]
    ) -> tuple[dict[str, Commit], dict[str, str]]:
        """Stage on all in parallel, then commit what is staged; (id -> commit, id -> why not)."""
        turn = asyncio.Lock()
        results = await asyncio.gather(
            *(self._publish_to(worker, release, turn) for worker in workers), return_exceptions=True
        )
        commits: dict[str, Commit] = {}
        failed: dict[str, str] = {}
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, Commit):
                commits[worker.id] = result
            elif isinstance(result, OmnifleetError):
                failed[worker.id] = str(result)
                log.warning("refit of %s to %s failed: %s", worker.id, release.version, result)
            elif isinstance(result, BaseException):
                raise result
        return commits, failed

    def _takes(self, worker: WorkerView, release: Any) -> bool:
        """True if a publish may send to this worker: it holds a version of ours, or needs none."""
        return release.delta is None or self._delivery.serves(worker) is not None

    async def _publish_to(self, worker: WorkerView, release: Release, turn: asyncio.Lock) -> Commit:
        async with self._delivery.turn(worker.id):
            parent = self._delivery.serves(worker)
            if parent is None and release.delta is not None:
                raise retryable(Reason.CONFLICT, f"{worker.id} needs a complete file; it catches up alone")
            parcel = release.complete() if parent is None else await self._parcel(worker, release, parent)
            release.sent = max(release.sent, parcel.transfer.size)
            try:
                return await self._delivery.send(worker, parcel, turn if self._rolling else None)
            except OmnifleetError as error:
                if parcel.transfer is release.step:
                    self._delivery.refused_sparse(worker.id, error)
                raise

    async def _parcel(self, worker: WorkerView, release: Release, parent: WeightVersion) -> Parcel:
        """The smallest that a worker at `parent` can be sent."""
        sparse = release.takes_step(parent) and await self._delivery.takes_sparse(worker)
        return release.on_top_of(parent, sparse=sparse)

    def rest(self) -> None:
        """The workers' engines sleep while the trainer has their devices: nobody is brought up until `go_on`."""
        self._resting = True

    def go_on(self, bare: Collection[str]) -> None:
        """Workers can take weights again; those in `bare` (ids) dropped theirs and need everything."""
        for worker in bare:
            self._delivery.lost_weights(worker)
        self._resting = False
        self._wake.set()

    async def keep_up(self) -> None:
        """Watch the fleet and bring each worker that is not at the current version there. Runs until cancelled."""
        pause = _FIRST_PAUSE_S
        try:
            while True:
                try:
                    async with aclosing(sightings(self._fleet, self._pool, self._wake)) as views:
                        async for view in views:
                            pause = _FIRST_PAUSE_S
                            await self._look(view)
                except OmnifleetError as error:
                    log.warning("the fleet cannot be watched: %s; again in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            await self._cancel_catch_ups()

    async def _look(self, view: FleetView) -> None:
        release = self._newest()
        if release is None or self._resting:
            return
        target = view.target_version
        if (
            target is None
            or not target.same_lineage(release.version)
            or target.number < release.version.number
        ):
            await self._fleet.announce_version(release.version, pool=self._pool, max_lag=self._max_lag)
        for worker in _reachable(view):
            if worker.id in self._behind or (self._publishing and self._takes(worker, release)):
                continue
            if worker.id in self._watch.busy or self._watch.given_up(worker.id, release.version):
                continue
            if self._is_behind(worker, release):
                task = asyncio.create_task(self._catch_up(worker), name=f"catch-up {worker.id}")
                self._behind[worker.id] = task
                task.add_done_callback(partial(self._caught_up, worker.id))
        living = {worker.id for worker in view.workers}
        self._delivery.keep(living)
        self._watch.keep(living)

    def _caught_up(self, worker: str, _: asyncio.Task[None]) -> None:
        self._behind.pop(worker, None)

    def _is_behind(self, worker: WorkerView, release: Any) -> bool:
        serves = self._delivery.serves(worker)
        return serves is None or serves.number < release.version.number

    async def _catch_up(self, worker: WorkerView) -> None:
        """Send the current version until the worker has it; the next snapshot tells if the worker is gone."""
        pause = _FIRST_PAUSE_S
        for _ in range(_ATTEMPTS):
            release = self._newest()
            if release is None:
                return
            try:
                async with self._slots, self._delivery.turn(worker.id):
                    log.info("%s caught up with %s", worker.id, await self._bring(worker, release))
                    why = await self._watch.over(worker, release.version)
                    if not why or self._watch.given_up(worker.id, release.version):
                        return
            except (OmnifleetError, OSError) as error:
                log.warning("%s cannot catch up with %s: %s", worker.id, release.version, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _bring(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Ask the worker what it serves: a reply that was lost may have left it whole. Then send what it lacks."""
        serves = await self._delivery.ask(worker)
        if serves is not None:
            if serves.number == release.version.number:
                return serves
            parcel = await self._parcel(worker, release, serves)
            return (await self._delivery.send(worker, parcel)).version
        try:
            return await self._send_whole(worker, release)
        finally:
            if len(self._behind) <= 1 or release is not self._release:
                release.drop_complete()

    async def _send_whole(self, worker: WorkerView, release: Release) -> WeightVersion:
        async with self._composing:
            await asyncio.to_thread(release.compose, self._shm_dir, self._bucket_bytes)
        return (await self._delivery.send(worker, release.complete())).version

    async def _restore(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Put a quarantined worker back to an older version. Its file goes when nobody reads it any more."""
        try:
            return await self._send_whole(worker, release)
        finally:
            release.drop_complete()

    async def close(self) -> None:
        """Stop catch-ups and remove all transfer files. Idempotent."""
        try:
            await self._cancel_catch_ups()
        finally:
            if self._release is not None:
                self._release.retire()
            if self._previous is not None:
                self._previous.retire()
            if self._base is not None:
                self._base.retire()
            self._release, self._previous, self._base = None, None, None

    async def _cancel_catch_ups(self) -> None:
        tasks = list(self._behind.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reachable(view: FleetView) -> list[WorkerView]:
    return [worker for worker in view.workers if worker.state not in _DEAF]
