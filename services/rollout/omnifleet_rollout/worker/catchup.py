"""A worker that stays behind catches up alone: from a READY peer, if the trainer does not bring it the weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion, WorkerState
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.refit.borrowing import borrowed
from omnifleet_rollout.refit.receiver import DEFAULT_DEADLINE_S, Receiver
from omnifleet_rollout.worker.standing import Standing

log = logging.getLogger("omnifleet.rollout.catchup")
_LOOK_S = 0.5


class CatchUp:
    """Looks at the pool's target as the registry tells it; `patience_s`: how long the trainer has, before peers are asked."""

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        standing: Standing,
        counters: Counters,
        *,
        find_gateway: Callable[[], Awaitable[str]],
        target: Callable[[], WeightVersion | None],
        secret: str,
        pool: str,
        patience_s: float,
        policy: InFlight,
    ) -> None:
        """target: the version that the registry wants of this pool, None if it names none."""
        self._engine, self._receiver, self._standing, self._counters = engine, receiver, standing, counters
        self._find_gateway, self._target, self._secret, self._pool = find_gateway, target, secret, pool
        self._patience_s, self._policy = patience_s, policy

    async def run(self) -> None:
        """For ever. What fails is tried again after the same patience."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(min(_LOOK_S, self._patience_s))
            if not self.behind():
                since = time.monotonic()
            elif time.monotonic() - since >= self._patience():
                try:
                    await self._from_a_peer()
                except (OmnifleetError, OSError) as error:
                    log.info("no peer brings this worker up: %s", error)
                since = time.monotonic()

    def _patience(self) -> float:
        """What is staged may wait for its turn to commit; whoever staged it may also be dead."""
        return max(self._patience_s, DEFAULT_DEADLINE_S if self._receiver.holds_stage else 0.0)

    def behind(self) -> bool:
        """True if this worker is not at the target and may take it from a peer.

        A quarantined worker may not: a peer's weights would be those that the canary told against.
        """
        target = self._target()
        busy = self._standing.draining or self._receiver.receiving or self._receiver.rest.asleep
        if target is None or busy or self._receiver.quarantined:
            return False
        return bool(self._standing.fence) or not _at(self._standing.version, target)

    async def _from_a_peer(self) -> None:
        peer = await self._peer()
        if peer is None or peer.version is None:
            return
        table = {spec.name: (spec.dtype, list(spec.shape)) for spec in self._engine.facts.tensors}
        log.info("taking %s from %s", peer.version, peer.id)
        async with (
            RefitClient.open(peer.grpc_address, self._secret) as lender,
            borrowed(lender, peer.version, table) as weights,
        ):
            if not self.behind():
                return  # the trainer was here meanwhile
            digest = await self._receiver.adopt(
                peer.version, weights.original, weights.manifest, str(weights.path)
            )
        await self._receiver.commit(digest, self._policy, DEFAULT_DEADLINE_S)
        self._counters.add("catch_ups_from_peers")
        log.info("caught up with %s from %s", peer.version, peer.id)

    async def _peer(self) -> WorkerView | None:
        """The least loaded worker that serves the target."""
        target = self._target()
        async with FleetClient.open(await self._find_gateway(), self._secret) as fleet:
            view = await fleet.list(self._pool)
        able = [
            worker
            for worker in view.workers
            if worker.id != self._standing.worker
            and worker.state is WorkerState.READY
            and target is not None
            and _at(worker.version, target)
        ]
        return min(able, key=lambda worker: worker.running + worker.waiting, default=None)


def _at(version: WeightVersion | None, target: WeightVersion) -> bool:
    return version is not None and version.same_lineage(target) and version.number == target.number
