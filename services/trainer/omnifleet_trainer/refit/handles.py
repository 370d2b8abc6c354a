"""Transport `cuda_ipc`, sender side: names for buckets on our GPU by which another process on it maps them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable

import torch

from omnifleet.client.refit import DeviceMemory


def handles(buckets: Iterable[torch.Tensor], device: torch.device) -> DeviceMemory:
    """Handles of buckets, each a storage of its own or a part of one. They must live until the worker has staged them.

    The device's work is waited for: a mapping process does not wait for ours.
    """
    torch.cuda.synchronize(device)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    fields = [_fields(bucket) for bucket in buckets]
    return DeviceMemory({gpu: json.dumps(fields)})


def _fields(bucket: torch.Tensor) -> list[int | bool | str]:
    """torch's own sharing of CUDA storages without the device number, which differs by process; bytes in base64."""
    shared = bucket.untyped_storage()._share_cuda_()[1:]  # type: ignore[no-untyped-call]
    return [base64.b64encode(f).decode() if isinstance(f, bytes) else f for f in shared]
