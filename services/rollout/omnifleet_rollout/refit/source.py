"""Where the bytes of a stage come from, as one string, so that it crosses to the engine's processes as it is."""

from __future__ import annotations

import json
from collections.abc import Collection
from urllib.parse import urlencode

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import refit_pb2

GROUP = "group://"
CUDA_IPC = "cuda-ipc:"


def source_of(request: refit_pb2.StageRequest, transports: Collection[str]) -> str:
    """A path in shared memory, "group://HOST:PORT/NAME?..." or "cuda-ipc:JSON". Raises UNSUPPORTED, INVALID_REQUEST."""
    transport = request.WhichOneof("transport")
    if transport not in transports:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"transport {transport or 'none'}: this worker takes {', '.join(transports)}",
        )
    if transport == "shm":
        return str(request.shm.path)
    if transport == "cuda_ipc":
        handles = {gpu: json.loads(fields) for gpu, fields in request.cuda_ipc.handles.items()}
        return CUDA_IPC + json.dumps(handles)
    nccl, deadline_s = request.nccl, request.deadline_ms / 1000
    fields = {"rank": nccl.rank_offset, "size": nccl.world_size, "deadline_s": deadline_s}
    return f"{GROUP}{nccl.master_address}:{nccl.master_port}/{nccl.unique_id.decode()}?{urlencode(fields)}"
