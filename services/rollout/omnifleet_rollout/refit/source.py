"""Where the bytes of a stage come from, as one string, so that it crosses to the engine's processes as it is.

Must not import gRPC's runtime: an engine's process may be forked from ours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory of the sender's on a GPU, to be mapped. handles: GPU uuid -> a handle for each bucket, in order.

    places: tensor -> (bucket, offset in bytes), where slices are cut out of these buckets; else they are the manifest's.
    """

    handles: Mapping[str, Sequence[list[int | str]]]
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return CUDA_IPC + json.dumps([self.handles, self.places])

    @staticmethod
    def parse(text: str) -> Lent:
        """Undo `str`."""
        handles, places = json.loads(text.removeprefix(CUDA_IPC))
        return Lent(handles, {name: (bucket, offset) for name, (bucket, offset) in places.items()})

    @staticmethod
    def from_wire(told: refit_pb2.CudaIpcTransport) -> Lent:
        """What a sender says. Raises INVALID_REQUEST."""
        try:
            handles = {gpu: list(json.loads(fields)) for gpu, fields in told.handles.items()}
        except (ValueError, TypeError) as error:
            raise OmnifleetError(Reason.INVALID_REQUEST, f"handles cannot be read: {error}") from error
        return Lent(handles, {place.name: (place.bucket, place.offset) for place in told.places})

    def only(self, bucket: int) -> Lent:
        """One bucket, as if it were all."""
        return Lent({gpu: [handles[bucket]] for gpu, handles in self.handles.items()})


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
        return str(Lent.from_wire(request.cuda_ipc))
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
