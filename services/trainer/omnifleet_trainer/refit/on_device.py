"""A version that lies in a snapshot, on the device or set aside on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omnifleet.types import WeightVersion
from omnifleet_trainer.refit.snapshot import Snapshot


class Lifted(Sequence[torch.Tensor]):
    """Buckets that lie elsewhere: each is on `device` only while it is used."""

    def __init__(self, buckets: Sequence[torch.Tensor], device: torch.device) -> None:
        self._buckets, self._device = buckets, device

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, index: Any) -> Any:
        return self._buckets[index].to(self._device)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The version in the snapshot, where a `Release` stands for transfer files.

    sent: bytes of the joint sends. owners: tensor -> the trainer's rank that keeps it too, beside the first, if it does.
    """

    version: WeightVersion
    encoder_changed: bool
    snapshot: Snapshot
    sent: list[int] = field(default_factory=list)
    owners: Mapping[str, int] = field(default_factory=dict)
