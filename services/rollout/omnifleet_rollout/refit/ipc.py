"""Transport `cuda_ipc`: the sender's buckets lie on our own GPU; they are mapped, copied into our shadow and verified."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.refit.buckets import Memory, Verification, layout, made_whole
from omnifleet_rollout.refit.shadow import rejected
from omnifleet_rollout.refit.source import CUDA_IPC


def receive(body: Mapping[str, Any], source: str, memory: Memory) -> dict[str, torch.Tensor]:
    """Copy and verify all buckets; views of the tensors. source: "cuda-ipc:" and JSON, GPU uuid -> handles of the buckets.

    The copy is checked, not the sender's memory. Raises REFIT_REJECTED, UNSUPPORTED if no handle is for our GPU.
    """
    handles = json.loads(source.removeprefix(CUDA_IPC))
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    if uuid not in handles:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the weights are on GPU {', '.join(handles) or 'none'}, this engine is on {uuid}",
            knob="trainer.refit_transport",
        )
    buckets = layout(body)
    if len(handles[uuid]) != len(buckets):
        raise rejected(f"{len(handles[uuid])} handles for {len(buckets)} buckets")
    buffers = memory.take([bucket.size for bucket in buckets], sum(made_whole(body).values()))
    verification = Verification(body, memory.device)
    stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(memory.device), torch.cuda.stream(stream):
        for bucket, data, handle in zip(buckets, buffers, handles[uuid], strict=True):
            data.copy_(_mapped(handle, memory.device)[: bucket.size])
            verification.queue(bucket, data)
        verification.check()
        stream.synchronize()
    return memory.cut(buckets, buffers)


def _mapped(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The sender's bucket, by the fields of torch's own sharing of CUDA storages: numbers, and bytes in base64."""
    fields = [base64.b64decode(f) if isinstance(f, str) else f for f in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
