"""Transport `cuda_ipc`, sender side: buckets on our GPU are lent to the workers of this host, whose ranks map them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

import torch

from omnifleet.client.refit import DeviceMemory
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_refit import lent
from omnifleet_trainer.refit.courier import Order, Outcome
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot

Places = Mapping[str, tuple[int, int]]
"""Tensor -> (bucket, offset in bytes)."""


def lend(buckets: Sequence[torch.Tensor], places: Places | None = None) -> DeviceMemory:
    """What workers map buckets by, each a storage of its own. They must live until the workers have staged them.

    places: where slices are cut out of them. The device's work is waited for: a mapping process does not wait for ours.
    """
    device = buckets[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    handles = [lent.handle_of(bucket) for bucket in buckets]
    return DeviceMemory({lent.gpu_of(device): json.dumps(handles)}, places or {})


def places_of(snapshot: Snapshot, shipment: Shipment) -> Places:
    """Where the tensors lie of which a shipment has slices."""
    names = sorted({piece.name for part in shipment.parts for piece in part.slices})
    return {name: (snapshot.places[name].bucket, snapshot.places[name].offset) for name in names}


class Lender:
    """Holds what it lends until the worker has answered: one that runs into its deadline may be reading yet."""

    def __init__(self) -> None:
        self._out: dict[str, Sequence[torch.Tensor]] = {}

    async def stage(
        self, orders: Mapping[str, Order], buckets: Sequence[torch.Tensor], places: Places, timeout_s: float
    ) -> dict[str, Outcome]:
        """Worker id -> outcome. buckets: those of the orders' manifests, or those that places are in."""
        held = await asyncio.to_thread(list, buckets)
        source = await asyncio.to_thread(lend, held, places)

        async def stage(id: str, order: Order) -> Outcome:
            self._out[id] = held
            outcome: Outcome
            try:
                outcome = await order.stage(source, timeout_s)
            except OmnifleetError as error:
                outcome = error
            if not isinstance(outcome, OmnifleetError) or outcome.reason is not Reason.DEADLINE:
                del self._out[id]
            return outcome

        outcomes = await asyncio.gather(*(stage(id, order) for id, order in orders.items()))
        return dict(zip(orders, outcomes, strict=True))

    def close(self) -> None:
        """Hold nothing any more."""
        self._out.clear()
