"""Transport `nccl` on CPU: one sender and three receivers in a gloo group, over real gRPC, with faults."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from omnifleet.types import InFlight, WeightVersion  # noqa: E402
from omnifleet_trainer.refit.courier import Courier, Order, Outcome  # noqa: E402
from omnifleet_trainer.refit.group import Meeting  # noqa: E402
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot  # noqa: E402
from tests.refit_world import CPU, MOVES, Receiving, receiving, tensors, write_checkpoint  # noqa: E402

BUCKET = 16 << 10
DEADLINE_S = 20.0


class Sender:
    """The trainer's half without the fleet registry."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(CPU, BUCKET)
        self.courier = Courier(Meeting("127.0.0.1"), CPU)
        self.version: WeightVersion | None = None
        self.digests: dict[str, str] = {}

    def pack(self, step: int, parent: WeightVersion | None) -> Shipment:
        held = self.digests if parent is not None else None
        self.snapshot.pack(tensors(step).items(), MOVES)
        return self.snapshot.shipment(WeightVersion("r", "l", step), parent, held, True)

    async def stage(
        self, workers: list[Receiving], shipment: Shipment, deadline_s: float = DEADLINE_S
    ) -> dict[str, Outcome]:
        orders = {worker.id: Order(worker.client, shipment) for worker in workers}
        buckets = [self.snapshot.buckets[i] for i in shipment.buckets]
        return await self.courier.stage(orders, buckets, deadline_s)

    async def publish(self, workers: list[Receiving], step: int, *, whole: bool = False) -> Shipment:
        shipment = self.pack(step, None if whole else self.version)
        outcomes = await self.stage(workers, shipment)
        for worker in workers:
            digest = outcomes[worker.id]
            assert digest == shipment.version.manifest_digest, digest
            commit = await worker.client.commit(str(digest), InFlight.KEEP, deadline_s=DEADLINE_S)
            assert commit.version == shipment.version
        self.version, self.digests = shipment.version, dict(self.snapshot.digests)
        return shipment


async def test_three_receivers_hold_what_a_fresh_loader_makes_first_checked_then_by_plan(
    tmp_path: Path,
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3) as workers:
        sender = Sender()
        first = await sender.publish(workers, 0)
        assert all(worker.holds(0) for worker in workers)
        second = await sender.publish(workers, 1)
        assert all(worker.holds(1) for worker in workers)
        assert [worker.engine.by_plan for worker in workers] == [[False, True]] * 3
        assert second.bytes < first.bytes, "the frozen bucket is not sent again"
        unchanged = [t.name for t in second.manifest.tensors if not t.changed]
        assert sorted(unchanged) == ["embed", "expert.0"]
        sender.courier.close()
