"""Memory on a GPU that other processes of its host map: both ends of torch's own sharing of CUDA storages.

torch counts the readers of what it shares: one for each sharing, less one for each that unmaps. Memory that is freed while
its count is not nought, one too many or one too few, is kept for ever. A handle of ours is for any number of readers, or
none. So the count of what we lend is brought to nought at once, readers count down one that belongs to nobody's memory,
and who lends holds what was lent until it was read.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Handle = list[int | str]
"""torch's fields without the device's number, which differs by process; bytes in base64."""
_told: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Memory -> handle. Each sharing wraps a storage once more, and wants a CUDA event until it is freed: one is enough."""


def handle_of(memory: torch.Tensor) -> Handle:
    """What others map it by: the whole storage that it begins. They do not wait for our device: finish its work before."""
    if memory not in _told:
        _told[memory] = _shared(memory)
    return list(_told[memory])


def mapped(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The memory behind a handle, uint8, as `device` reaches it: over NVLink if it is another GPU's.

    That one need not be visible here, and gets no context of ours. Raises RuntimeError where CUDA can't do it. Unmapped
    with the last view of it, which waits for the stream that is the current one then.
    """
    fields = [base64.b64decode(field) if isinstance(field, str) else field for field in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_of(device: torch.device) -> str:
    """A name for a GPU that all processes of all hosts use: its UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def may_reach(device: torch.device, gpu: str) -> bool:
    """False if `device` can't read that GPU's memory; True also for one that this process does not see, and can't ask about."""
    for number in range(torch.cuda.device_count()):
        other = torch.device("cuda", number)
        if gpu_of(other) == gpu:
            return other == device or torch.cuda.can_device_access_peer(device, other)
    return True


def _shared(memory: torch.Tensor) -> Handle:
    _, block, size, offset, *counter, _, _ = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    torch.UntypedStorage._release_ipc_counter_cuda(*counter)
    _, nobodys = _nobodys_counter(memory.device)
    fields = [block, size, offset, *nobodys, b"", False]  # no event to wait for
    return [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


@functools.cache
def _nobodys_counter(device: torch.device) -> tuple[torch.Tensor, tuple[bytes, int]]:
    """A counter that keeps only a byte from being freed: it is there for as long as this process."""
    spare = torch.empty(1, dtype=torch.uint8, device=device)
    _, _, _, _, file, place, _, _ = spare.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return spare, (file, place)
