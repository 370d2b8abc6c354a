"""Trainers of several ranks: each keeps its share of a version's tensors and sends the slices of them itself.

The first rank still has all tensors, makes the manifest, and sends whatever is not in parts. What leaves it in parts is
what is left when the others have theirs: with R ranks an R-th, each over a link of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from omnifleet.errors import OmnifleetError
from omnifleet_refit.group import SENDER, call_off, join
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.parts import Cut, part_of
from omnifleet_trainer.refit.sending import Errand, Sending
from omnifleet_trainer.refit.snapshot import BUCKET_BYTES, Snapshot

Order = Mapping[str, Any]
"""Plain data: host and port of the meeting, membership, deadline_s, and errands: name, size, part."""


class Others(Protocol):
    """The ranks of the trainer besides the first, that keep and send their shares."""

    count: int

    def send(self, orders: Sequence[Order | None], deadline_s: float) -> None:
        """Have each do its order, if it has one. Blocks until all are done. Raises what the first that failed says."""
        ...

    def stop(self) -> None:
        """Break off what they send. Idempotent."""
        ...


def deal(sizes: Mapping[str, int], senders: int) -> dict[str, int]:
    """Tensor -> who sends it, 0..senders - 1: the largest first, each to whom has least. sizes: bytes."""
    loads = [0] * senders
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(range(senders), key=loads.__getitem__)
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


class Share:
    """What one rank keeps and sends. device: of its tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._snapshot: Snapshot | None = None
        self._meeting: tuple[str, int] = ("", 0)
        self._sending = Sending(self._open)

    def pack(self, tensors: Iterable[tuple[str, Tensor]], names: Collection[str]) -> None:
        """Go through all tensors, and keep copies of those named."""
        kept = {name: torch.as_tensor(tensor).detach().clone() for name, tensor in tensors if name in names}
        if self._snapshot is None or self._snapshot.places.keys() != kept.keys():
            self._snapshot = Snapshot(self._device, BUCKET_BYTES, verified=False) if kept else None
        if self._snapshot is not None:
            self._snapshot.pack(kept.items())

    def send(self, order: Order) -> None:
        """Send what is ordered. Blocks. Raises UNAVAILABLE, DEADLINE; receivers that still wait for a group are told."""
        self._meeting = (str(order["host"]), int(order["port"]))
        self._sending.enter(order["membership"])
        try:
            self._sending.send(order["membership"], self._errands(order), float(order["deadline_s"]))
        except OmnifleetError:
            self._sending.close()
            call_off(*self._meeting, [errand["name"] for errand in order["errands"]])
            raise

    def stop(self) -> None:
        """Break off a `send` of another thread. Idempotent."""
        self._sending.close()

    def _errands(self, order: Order) -> list[Errand]:
        assert self._snapshot is not None, "nothing was packed"
        return [
            Errand(one["name"], int(one["size"]), Cut(part_of(one["part"]), self._snapshot, self._device))
            for one in order["errands"]
        ]

    def _open(self, name: str, size: int, seconds: float) -> Any:
        host, port = self._meeting
        return join(host, port, name, rank=SENDER, size=size, device=self._device, timeout_s=seconds)
