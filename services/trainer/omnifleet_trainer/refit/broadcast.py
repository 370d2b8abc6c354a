"""The sender of transports `nccl` and `cuda_ipc`: one snapshot on the device, sent to all workers at once or one by one.

What a version changed is known by digest, so a worker gets the buckets that differ from the version it holds, and a
newcomer gets all; both come from the same snapshot. The snapshot holds one version: packing the next one waits for
catch-ups that run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.refit import Commit, EngineView, RefitClient
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet_refit.group import Meeting, own_address
from omnifleet_refit.windows import Needs, needs_of
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.courier import Courier, Leg, Order, Outcome, no_room
from omnifleet_trainer.refit.lender import Lender, places_of
from omnifleet_trainer.refit.on_device import Lifted, OnDevice
from omnifleet_trainer.refit.parts import Cut
from omnifleet_trainer.refit.sender import RefitReport, RefitSender
from omnifleet_trainer.refit.share import Others, deal
from omnifleet_trainer.refit.snapshot import BUCKET_BYTES, Shipment, Snapshot

log = logging.getLogger("omnifleet.trainer.refit")
_REMEMBERED = 16
"""Versions whose digests are kept; a worker further behind gets everything."""
_EVERYTHING = Taker(None, None, sparse=False)


class BroadcastSender(RefitSender):
    """See `RefitSender`. transport: nccl (a group over GPUs, or gloo on a CPU) or cuda_ipc (workers of this host)."""

    def __init__(
        self,
        fleet: FleetClient,
        secret: str,
        *,
        device: torch.device,
        transport: str = "nccl",
        host: str = "",
        device_bucket_bytes: int = BUCKET_BYTES,
        **settings: Any,
    ) -> None:
        """host: our address as workers reach it; default: that of this host's name."""
        super().__init__(fleet, secret, **settings)
        self._snapshot = Snapshot(device, device_bucket_bytes)
        self._transport = transport
        self._meeting = Meeting(host or own_address()) if transport == "nccl" else None
        self._couriers: dict[str, Courier] = {}
        self._lender = Lender()
        self._digests: dict[int, Mapping[str, str]] = {}
        self._using = asyncio.Lock()
        self._current: OnDevice | None = None
        self._kept: OnDevice | None = None
        """The version before, in host memory, if there is a guard."""
        self._keeping = asyncio.Lock()
        self._others: Others | None = None
        self._dealt: Mapping[str, int] = {}
        self._read: tuple[str, Sequence[Needs]] = ("", [])
        """What an engine's ranks read, by the digest of it: the last that was asked for."""

    @staticmethod
    @asynccontextmanager
    async def connect(fleet_address: str, secret: str, **settings: Any) -> AsyncIterator[BroadcastSender]:
        """Connect to the fleet registry with a token of scope trainer."""
        async with FleetClient.open(fleet_address, secret) as fleet:
            sender = BroadcastSender(fleet, secret, **settings)
            try:
                yield sender
            finally:
                await sender.close()

    @property
    def version(self) -> WeightVersion | None:
        """The version published last."""
        return self._current.version if self._current else None

    async def publish(self, number: int, *args: Any, **kwargs: Any) -> RefitReport:
        """See `RefitSender.publish`. Waits for catch-ups that still read the version before."""
        async with self._using:
            await self._keep(number)
            return await super().publish(number, *args, **kwargs)

    def share(self, others: Others | None, names: Collection[str]) -> list[set[str]]:
        """See `RefitSender.share`. Nothing while no engine takes parts."""
        self._others, self._dealt = others, {}
        if others is None or self._meeting is None or not self._read[1] or not self._snapshot.places:
            return []
        sizes = {name: self._snapshot.places[name].bytes for name in names if name in self._snapshot.places}
        self._dealt = deal(sizes, others.count + 1)
        ranks = range(1, others.count + 1)
        return [{name for name, owner in self._dealt.items() if owner == rank} for rank in ranks]

    async def _keep(self, number: int) -> None:
        """Copy the newest version to the host before the next one is packed over it. Without room there is no way back."""
        current = self._current
        if self.guard is None or current is None or number <= current.version.number:
            return
        async with self._keeping:
            earlier, self._kept = self._kept, None
            try:
                copy = await asyncio.to_thread(
                    current.snapshot.copy_to_host, earlier.snapshot if earlier else None
                )
            except MemoryError as error:
                log.warning("%s; a worker that the canary tells against will serve nothing", error)
                return
            self._kept = OnDevice(current.version, True, copy)

    def _before(self) -> OnDevice | None:
        return self._kept

    async def _restore(self, worker: WorkerView, release: Any) -> WeightVersion:
        async with self._keeping:
            return await self._bring_whole(worker, release)

    def _newest(self) -> OnDevice | None:
        return self._current

    def _pack(
        self,
        version: WeightVersion,
        tensors: Iterator[tuple[str, Tensor]],
        changed: set[str],
        encoder_changed: bool,
    ) -> OnDevice:
        self._snapshot.pack(tensors, changed, sparse=self._sparse)
        return OnDevice(version, encoder_changed, self._snapshot, owners=self._dealt)

    def _take(self, release: Any) -> None:
        self._current = release
        self._digests[release.version.number] = dict(self._snapshot.digests)
        while len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]

    def _drop(self, release: Any) -> None:
        """A publish that was cancelled while it packed: the snapshot is the next publish's."""

    def _takes(self, worker: WorkerView, release: Any) -> bool:
        return True

    def _size(self, release: Any) -> int:
        return release.sent[-1] if release.sent else 0

    async def _send_all(
        self, release: Any, workers: list[WorkerView]
    ) -> tuple[dict[str, Commit], dict[str, str]]:
        """Stage on all in one broadcast, then commit what is staged; who has no room for that comes after, one by one."""
        commits: dict[str, Commit] = {}
        failed: dict[str, str] = {}
        turn = asyncio.Lock() if self._rolling else None
        async with AsyncExitStack() as stack:
            clients = {w.id: await stack.enter_async_context(self._delivery.open(w)) for w in workers}
            for worker in workers:
                await stack.enter_async_context(self._delivery.turn(worker.id))
            outcomes = await self._stage(release, workers, clients, "all")

            async def commit(worker: str, staged: Outcome) -> None:
                try:
                    with self._delivery.blaming(worker):
                        commits[worker] = await self._commit(clients[worker], worker, staged, turn)
                except OmnifleetError as error:
                    failed[worker] = str(error)
                    log.warning("refit of %s to %s failed: %s", worker, release.version, error)

            apart = [worker for worker in workers if no_room(outcomes[worker.id])]
            together = [worker.id for worker in workers if worker not in apart]
            await asyncio.gather(*(commit(id, outcomes[id]) for id in together))
            for worker in apart:
                await commit(worker.id, await self._stage_alone(release, worker, clients[worker.id]))
        return commits, failed

    async def _bring(self, worker: WorkerView, release: Any) -> WeightVersion:
        """Bring one worker to the newest version, alone; see `RefitSender`."""
        async with self._using:
            release = self._current or release
            serves = await self._delivery.ask(worker)
            if serves is not None and serves.number == release.version.number:
                return serves
            return await self._bring_whole(worker, release)

    async def _bring_whole(self, worker: WorkerView, release: OnDevice) -> WeightVersion:
        async with self._delivery.open(worker) as client:
            with self._delivery.blaming(worker.id):
                outcome = await self._stage_alone(release, worker, client)
                return (await self._commit(client, worker.id, outcome)).version

    async def _commit(
        self, client: RefitClient, worker: str, staged: Outcome, turn: asyncio.Lock | None = None
    ) -> Commit:
        if isinstance(staged, OmnifleetError):
            raise staged
        return await self._delivery.commit(client, worker, staged, turn)

    async def _stage_alone(self, release: OnDevice, worker: WorkerView, client: RefitClient) -> Outcome:
        """What it lacks, into a shadow; where there is no room, and it may be fenced, all of it, straight into place."""
        clients = {worker.id: client}
        outcome = (await self._stage(release, [worker], clients, worker.id))[worker.id]
        if not no_room(outcome) or not self._may_fence(worker):
            return outcome
        async with self._one_fenced:
            return (await self._stage(release, [worker], clients, worker.id, in_place=True))[worker.id]

    async def _stage(
        self,
        release: OnDevice,
        workers: list[WorkerView],
        clients: Mapping[str, RefitClient],
        courier: str,
        *,
        in_place: bool = False,
    ) -> dict[str, Outcome]:
        views: dict[str, EngineView] = {}
        outcomes: dict[str, Outcome] = {}
        for worker in workers:
            try:
                views[worker.id] = await clients[worker.id].describe(deadline_s=self._delivery.timeout_s)
            except OmnifleetError as error:
                outcomes[worker.id] = error
                continue
            if courier == "all" and not views[worker.id].shadow:  # it would break the round for all
                outcomes[worker.id] = retryable(Reason.NO_ROOM, f"{worker.id} had no room for a shadow")
                del views[worker.id]
        if not views:
            return outcomes
        snapshot = release.snapshot
        lives = snapshot is self._snapshot  # else it is on the host, which is slow to cut
        needs = await self._needs(views, clients) if lives else []
        takers = {
            worker.id: _EVERYTHING if in_place else self._taker(worker, views[worker.id])
            for worker in workers
            if worker.id in views
        }
        owners = release.owners if courier == "all" else {}
        shipments = await asyncio.to_thread(
            choose, snapshot, release.version, takers, needs, release.encoder_changed, owners
        )
        for id, shipment in shipments.items():
            self._delivery.expect(id, shipment.version)
        policy = self._delivery.in_flight if in_place else None
        orders = {
            id: Order(clients[id], shipment, views[id].ranks, policy) for id, shipment in shipments.items()
        }
        shipment = next(iter(shipments.values()))
        release.sent.append(shipment.bytes)
        if self._meeting is None:
            staged = await self._lend(orders, snapshot, shipment)
        else:
            staged = await self._move(self._meeting, orders, self._legs(snapshot, shipment), courier)
        for id, outcome in staged.items():
            if shipment.step and isinstance(outcome, OmnifleetError):
                self._delivery.refused_sparse(id, outcome)
        return outcomes | staged

    def _taker(self, worker: WorkerView, view: EngineView) -> Taker:
        serves = self._delivery.serves(worker)
        parent = serves if serves is not None and serves.number in self._digests else None
        held = self._digests[parent.number] if parent is not None else None
        return Taker(parent, held, view.sparse and not self._delivery.refuses_sparse(worker.id))

    async def _needs(
        self, views: Mapping[str, EngineView], clients: Mapping[str, RefitClient]
    ) -> Sequence[Needs]:
        """What the ranks of every worker read; empty if workers differ, have one rank, or take tensors whole."""
        wanted = {(view.needs, view.ranks) for view in views.values()}
        digest, ranks = wanted.pop()
        if wanted or not digest or ranks == 1:
            return []
        if self._read[0] != digest:
            try:
                client = clients[next(iter(views))]
                said, bodies = await client.needs(deadline_s=self._delivery.timeout_s)
            except OmnifleetError as error:
                log.warning("%s; its engine is sent tensors whole", error)
                return []
            if said != digest or len(bodies) != ranks:
                return []  # it has changed its mind meanwhile
            self._read = (digest, [needs_of(body) for body in bodies])
        return self._read[1]

    def _legs(self, snapshot: Snapshot, shipment: Shipment) -> list[Leg]:
        if shipment.parts:
            device = self._snapshot.device
            return [Leg(Cut(part, snapshot, device), part.ranks, part) for part in shipment.parts]
        return [Leg(self._whole(snapshot, shipment))]

    def _whole(self, snapshot: Snapshot, shipment: Shipment) -> Sequence[torch.Tensor]:
        lying = snapshot.contents(shipment)
        return lying if snapshot is self._snapshot else Lifted(lying, self._snapshot.device)

    async def _move(
        self, meeting: Meeting, orders: Mapping[str, Order], legs: Sequence[Leg], courier: str
    ) -> dict[str, Outcome]:
        one = self._couriers.setdefault(courier, Courier(meeting, self._snapshot.device))
        try:
            return await one.stage_legs(orders, legs, self._delivery.timeout_s, self._others)
        finally:
            if courier != "all":
                self._couriers.pop(courier).close()

    async def _lend(
        self, orders: Mapping[str, Order], snapshot: Snapshot, shipment: Shipment
    ) -> dict[str, Outcome]:
        """Parts are not made: what workers map then is the snapshot, and each rank cuts its slices out of that."""
        buckets = snapshot.buckets if shipment.parts else self._whole(snapshot, shipment)
        places = places_of(snapshot, shipment)
        return await self._lender.stage(orders, buckets, places, self._delivery.timeout_s)

    def _forget(self) -> None:
        for courier in self._couriers.values():
            courier.close()
        self._couriers.clear()
        self._lender.close()
