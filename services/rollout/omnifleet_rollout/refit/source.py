"""Where the bytes of a stage come from, as one string, so that it crosses to the engine's processes as it is.

Must not import gRPC's runtime: an engine's process may be forked from ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qs, urlencode, urlsplit

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import refit_pb2

GROUP = "group://"
CUDA_IPC = "cuda-ipc:"


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a process group. name: of the meeting at host:port. rank: of the engine's first rank. deadline_s: to be staged."""

    host: str
    port: int
    name: str
    rank: int
    size: int
    deadline_s: float

    def __str__(self) -> str:
        fields = {"rank": self.rank, "size": self.size, "deadline_s": self.deadline_s}
        return f"{GROUP}{self.host}:{self.port}/{self.name}?{urlencode(fields)}"

    @staticmethod
    def parse(text: str) -> Seat:
        """Undo `str`. Raises INVALID_REQUEST."""
        try:
            url = urlsplit(text)
            fields = {key: values[0] for key, values in parse_qs(url.query).items()}
            return Seat(
                str(url.hostname),
                int(url.port or 0),
                url.path.strip("/"),
                int(fields["rank"]),
                int(fields["size"]),
                float(fields["deadline_s"]),
            )
        except (ValueError, KeyError) as error:
            raise OmnifleetError(
                Reason.INVALID_REQUEST, f"{text} is not the address of a group: {error}"
            ) from error


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
    nccl = request.nccl
    return str(
        Seat(
            nccl.master_address,
            nccl.master_port,
            nccl.unique_id.decode(),
            nccl.rank_offset,
            nccl.world_size,
            request.deadline_ms / 1000,
        )
    )
