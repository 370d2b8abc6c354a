"""Parcels to workers, and what is known of the weights that each worker holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from omnifleet.client.fleet import WorkerView
from omnifleet.client.refit import Commit, File, RefitClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion, WorkerState
from omnifleet_trainer.refit.release import Parcel

_HEARTBEAT_S = 3.0
"""For so long after a commit a worker's report may still tell of the time before it."""
_EDITIONS = 1024
"""Versions of ours that are remembered; a worker further behind gets a complete file."""


class Delivery:
    """Knows of each worker what it committed to us last, else what it reports. timeout_s: of stage and of commit. in_flight: what
    becomes of requests that run."""

    def __init__(self, secret: str, in_flight: InFlight, timeout_s: float) -> None:
        self._secret, self.in_flight, self._timeout_s = secret, in_flight, timeout_s
        self._issued: dict[WeightVersion, None] = {}
        self._at: dict[str, tuple[WeightVersion, float]] = {}
        self._broken: set[str] = set()
        self._sparse: dict[str, bool] = {}
        self._refused: set[str] = set()
        self._turns: dict[str, asyncio.Lock] = {}

    def turn(self, worker: str) -> asyncio.Lock:
        """Held by whoever sends to a worker: one at a time."""
        return self._turns.setdefault(worker, asyncio.Lock())

    def serves(self, worker: WorkerView) -> WeightVersion | None:
        """The version of ours that a worker holds whole, if any."""
        if self._needs_complete(worker):
            return None
        known = self._at[worker.id][0] if worker.id in self._at else worker.version
        return known if known in self._issued else None

    async def ask(self, worker: WorkerView) -> WeightVersion | None:
        """Like `serves`, from the worker itself. Raises OmnifleetError."""
        async with RefitClient.open(worker.grpc_address, self._secret) as client:
            version = (await client.describe()).version
        if version not in self._issued or self._needs_complete(worker):
            return None
        self._at[worker.id] = (version, time.monotonic())
        return version

    async def takes_sparse(self, worker: WorkerView) -> bool:
        """True if its engine takes sparse tensors, and has refused none. Asked once. Raises OmnifleetError."""
        if worker.id not in self._sparse:
            async with self.open(worker) as client:
                self._sparse[worker.id] = (await client.describe()).sparse
        return self._sparse[worker.id] and not self.refuses_sparse(worker.id)

    def refuses_sparse(self, worker: str) -> bool:
        """True if it refused sparse tensors before, whatever it says of itself."""
        return worker in self._refused

    def refused_sparse(self, worker: str, error: OmnifleetError) -> None:
        """It answered so to a stage with sparse tensors: if it lacked the bytes that they build on, it is sent none again."""
        if error.reason is Reason.REFIT_REJECTED:
            self._refused.add(worker)

    async def send(
        self,
        worker: WorkerView,
        parcel: Parcel,
        turn: asyncio.Lock | None = None,
        *,
        in_place: bool = False,
    ) -> Commit:
        """Stage, then commit (in turn). Until the worker says so, nothing is known of what it serves.

        in_place: without a shadow; the parcel is a complete one.

        Raises what the worker says, or UNAVAILABLE, DEADLINE; one that refused or was fenced needs a complete file.
        """
        self.expect(worker.id, parcel.version)
        with parcel.transfer.in_use(), self.blaming(worker.id):
            async with RefitClient.open(worker.grpc_address, self._secret) as client:
                digest = await self._stage(client, worker, parcel, in_place)
                return await self.commit(client, worker.id, digest, turn)

    def expect(self, worker: str, version: WeightVersion) -> None:
        """A version of ours is on its way; until a commit, nothing is known of what the worker serves."""
        self._at.pop(worker, None)
        self._issue(version)

    async def commit(
        self, client: RefitClient, worker: str, digest: str, turn: asyncio.Lock | None = None
    ) -> Commit:
        """Have a worker serve what it staged, in turn. Raises what it says."""
        async with turn or _no_turn():
            commit = await client.commit(digest, self.in_flight, deadline_s=self._timeout_s)
        self._broken.discard(worker)
        self._at[worker] = (commit.version, time.monotonic())
        return commit

    def lost_weights(self, worker: str) -> None:
        """A worker dropped its weights, as it was told to: it needs everything next time."""
        self._broken.add(worker)
        self._at.pop(worker, None)

    @contextmanager
    def blaming(self, worker: str) -> Iterator[None]:
        """A worker that refused inside, or was fenced, needs everything next time."""
        try:
            yield
        except OmnifleetError as error:
            if error.reason in (Reason.FENCED, Reason.REFIT_REJECTED):
                self._broken.add(worker)
            raise

    async def quarantine(self, worker: WorkerView, why: str) -> None:
        """Have a worker serve nothing until it has everything again. Raises what it says."""
        self._broken.add(worker.id)
        self._at.pop(worker.id, None)
        async with self.open(worker) as client:
            await client.quarantine(why)

    def distrust(self, worker: str) -> None:
        """What a worker holds is not built upon: it gets everything next time."""
        self._broken.add(worker)

    def open(self, worker: WorkerView) -> AbstractAsyncContextManager[RefitClient]:
        """A client of the worker's Refit service."""
        return RefitClient.open(worker.grpc_address, self._secret)

    @property
    def timeout_s(self) -> float:
        """Deadline of a stage, and of a commit."""
        return self._timeout_s

    def keep(self, living: Set[str]) -> None:
        """Forget workers that are gone."""
        self._at = {id: known for id, known in self._at.items() if id in living}
        self._turns = {id: turn for id, turn in self._turns.items() if id in living or turn.locked()}
        self._sparse = {id: takes for id, takes in self._sparse.items() if id in living}
        self._broken &= living
        self._refused &= living

    async def _stage(self, client: RefitClient, worker: WorkerView, parcel: Parcel, in_place: bool) -> str:
        file = File(parcel.transfer.path, parcel.transfer.size)
        policy = self.in_flight if in_place else None
        seen = await client.stage(parcel.manifest, file, deadline_s=self._timeout_s, in_place=policy)
        if seen != parcel.version.manifest_digest:
            await client.abort(seen, "the digests of the manifest differ")
            raise OmnifleetError(
                Reason.REFIT_REJECTED,
                f"{worker.id} reads manifest {seen[:12]}, the sender made {parcel.version}",
            )
        return seen

    def _issue(self, version: WeightVersion) -> None:
        self._issued[version] = None
        while len(self._issued) > _EDITIONS:
            del self._issued[next(iter(self._issued))]

    def _needs_complete(self, worker: WorkerView) -> bool:
        """True if the worker failed us, or says that it is not whole, and did not say so before its last commit."""
        committed = self._at[worker.id][1] if worker.id in self._at else float("-inf")
        says_so = worker.state is WorkerState.STALE and time.monotonic() - committed > _HEARTBEAT_S
        return says_so or worker.id in self._broken


@asynccontextmanager
async def _no_turn() -> AsyncIterator[None]:
    yield
