"""Memory of the host in the place of a GPU's: with this, transport `cuda_ipc` runs on a CPU, within one process or between some."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from omnifleet_refit import lent

GPU = "GPU-of-the-sender"


@dataclass
class Rehearsal:
    """What was shared and mapped. gpus: that workers reach; own: where they are; broken: nothing can be mapped."""

    own: str = GPU
    gpus: set[str] = field(default_factory=set)
    broken: bool = False
    shared: int = 0
    mappings: list[StorageWeakRef] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Mappings that are there."""
        return sum(not mapping.expired() for mapping in self.mappings)

    def share(self, memory: torch.Tensor) -> lent.Handle:
        """In the place of torch's sharing: the storage becomes a file that others map."""
        self.shared += 1
        manager, file, size = memory.untyped_storage()._share_filename_cpu_()
        return [base64.b64encode(manager).decode(), base64.b64encode(file).decode(), size]

    def map(self, handle: Sequence[Any], device: torch.device) -> torch.Tensor:
        """In the place of `lent.mapped`."""
        if self.broken:
            raise RuntimeError("CUDA error: invalid resource handle\nand more lines")
        manager, file, size = handle
        names = base64.b64decode(manager), base64.b64decode(file)
        storage = torch.UntypedStorage._new_shared_filename_cpu(*names, size)
        self.mappings.append(StorageWeakRef(storage))
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def rehearse(patch: Callable[[object, str, object], None] = setattr) -> Rehearsal:
    """From now on this process lends and maps so."""
    rehearsal = Rehearsal()
    patch(lent, "_shared", rehearsal.share)
    patch(lent, "mapped", rehearsal.map)
    patch(lent, "gpu_of", lambda device: rehearsal.own)
    patch(lent, "may_reach", lambda device, gpu: gpu in rehearsal.gpus)
    return rehearsal
