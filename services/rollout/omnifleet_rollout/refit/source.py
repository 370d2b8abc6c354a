"""Where the bytes of a stage come from, as one string, so that it crosses to the engine's processes as it is.

Must not import gRPC's runtime: an engine's process may be forked from ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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

    def of_rank(self, rank: int) -> Seat:
        """The place of one of the engine's ranks."""
        return replace(self, rank=self.rank + rank)

    def of_part(self, number: int, ranks: Sequence[int], rank: int) -> Seat:
        """The place of one of the engine's ranks in the group of a part, which is for `ranks` of each engine.

        With parts, a seat counts engines as if each were one rank.
        """
        return replace(
            self,
            name=f"{self.name}.{number}",
            rank=1 + (self.rank - 1) * len(ranks) + ranks.index(rank),
            size=1 + (self.size - 1) * len(ranks),
        )


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
