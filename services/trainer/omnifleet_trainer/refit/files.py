"""The sender of transport `shm`: a version as files in shared memory, which all workers of the host read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.refit import Commit
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.release import Parcel, Release, add_step, first_release, next_release
from omnifleet_trainer.refit.sender import RefitSender
from omnifleet_trainer.refit.transfer import Transfer, sweep

log = logging.getLogger("omnifleet.trainer.refit")

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 64 << 20


class FileSender(RefitSender):
    """See `RefitSender`. Open with `FileSender.open`. A version is a `Release`."""

    def __init__(
        self,
        fleet: FleetClient,
        secret: str,
        *,
        shm_dir: Path = SHARED_MEMORY,
        bucket_bytes: int = BUCKET_BYTES,
        **settings: Any,
    ) -> None:
        super().__init__(fleet, secret, **settings)
        self._shm_dir, self._bucket_bytes = shm_dir, bucket_bytes
        self._base: Transfer | None = None
        self._release: Release | None = None
        self._previous: Release | None = None
        self._composing = asyncio.Lock()

    @staticmethod
    @asynccontextmanager
    async def open(
        fleet_address: str, secret: str, *, shm_dir: Path = SHARED_MEMORY, **settings: Any
    ) -> AsyncIterator[FileSender]:
        """Connect to the fleet registry with a token of scope trainer; removes transfer files of dead senders.

        settings: see `FileSender` and `RefitSender`.
        """
        for path in sweep(shm_dir):
            log.info("removed %s of a sender that is gone", path)
        async with FleetClient.open(fleet_address, secret) as fleet:
            sender = FileSender(fleet, secret, shm_dir=shm_dir, **settings)
            try:
                yield sender
            finally:
                await sender.close()

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

    def _newest(self) -> Release | None:
        return self._release

    def _before(self) -> Release | None:
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
                sent = self._delivery.send(worker, parcel, turn if self._rolling else None)
                return await self._or_in_place(worker, release, sent)
            except OmnifleetError as error:
                if parcel.transfer is release.step:
                    self._delivery.refused_sparse(worker.id, error)
                raise

    async def _parcel(self, worker: WorkerView, release: Release, parent: WeightVersion) -> Parcel:
        """The smallest that a worker at `parent` can be sent."""
        sparse = release.takes_step(parent) and await self._delivery.takes_sparse(worker)
        return release.on_top_of(parent, sparse=sparse)

    async def _bring(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Ask the worker what it serves: a reply that was lost may have left it whole. Then send what it lacks."""
        serves = await self._delivery.ask(worker)
        if serves is not None:
            if serves.number == release.version.number:
                return serves
            parcel = await self._parcel(worker, release, serves)
            return (await self._or_in_place(worker, release, self._delivery.send(worker, parcel))).version
        try:
            return await self._send_whole(worker, release)
        finally:
            if len(self.catching_up.behind) <= 1 or release is not self._release:
                release.drop_complete()

    async def _send_whole(self, worker: WorkerView, release: Release) -> WeightVersion:
        sent = self._delivery.send(worker, await self._complete(release))
        return (await self._or_in_place(worker, release, sent)).version

    async def _complete(self, release: Release) -> Parcel:
        async with self._composing:
            await asyncio.to_thread(release.compose, self._shm_dir, self._bucket_bytes)
        return release.complete()

    async def _or_in_place(self, worker: WorkerView, release: Release, sent: Awaitable[Commit]) -> Commit:
        """What was sent; where there is no room for it, and the worker may be fenced, all of it, straight into place."""
        try:
            return await sent
        except OmnifleetError as error:
            if error.reason is not Reason.NO_ROOM or not self._may_fence(worker):
                raise
        async with self._one_fenced:
            parcel = await self._complete(release)
            release.sent = max(release.sent, parcel.transfer.size)
            return await self._delivery.send(worker, parcel, in_place=True)

    async def _restore(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Put a quarantined worker back to an older version. Its file goes when nobody reads it any more."""
        try:
            return await self._send_whole(worker, release)
        finally:
            release.drop_complete()

    def _forget(self) -> None:
        if self._release is not None:
            self._release.retire()
        if self._previous is not None:
            self._previous.retire()
        if self._base is not None:
            self._base.retire()
        self._release, self._previous, self._base = None, None, None
