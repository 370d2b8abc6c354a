"""Where a rank stands: its share of the host, and its process group, of its own or of a world that is just being built."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.tensor import debug

from omnifleet.errors import OmnifleetError, Reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. host, port: of the rendezvous. Collectives fail after timeout_s. per_node: ranks of one node."""

    rank: int
    world: int
    port: int
    timeout_s: float
    host: str = "127.0.0.1"
    per_node: int = 1

    @property
    def gpu(self) -> int:
        """Its GPU, where there are some."""
        return self.rank % self.per_node

    def device(self) -> torch.device:
        """Where it computes; alone it stays on the GPU that is current."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.gpu if self.world > 1 else torch.cuda.current_device())

    def take_threads(self, count: int | None) -> None:
        """Compute on so many threads; None: on its part of the node's, where others are."""
        if count is None and self.world > 1:  # else every rank takes all of them
            count = max((os.cpu_count() or 1) // self.per_node, 1)
        if count is not None:
            torch.set_num_threads(count)


ALONE = Place(rank=0, world=1, port=0, timeout_s=600.0)
"""The only rank; its rendezvous is in its own memory."""


def start_group(place: Place, store: Store | None = None) -> bool:
    """Join the default process group; True if it was made here (a world of one is content with one that exists).

    store: of the rank that keeps the rendezvous. On a GPU machine the r-th rank takes GPU r. Raises OmnifleetError(CONFLICT).
    """
    if dist.is_initialized():
        if place.world == dist.get_world_size() == 1:
            return False
        raise OmnifleetError(
            Reason.CONFLICT,
            f"this process is in a group of {dist.get_world_size()} already: close that policy first",
        )
    _forget_meshes()
    timeout = datetime.timedelta(seconds=place.timeout_s)
    if place.world == 1:
        store = HashStore()
    elif torch.cuda.is_available():
        torch.cuda.set_device(place.gpu)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=store or rendezvous(place.world, host=place.host, port=place.port, timeout_s=place.timeout_s),
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
    )
    return True


def _forget_meshes() -> None:
    """DTensor remembers what an operation gives, with the mesh of the world where it first ran. An equal mesh of a new world finds
    that, and the tensor gets the old one: whoever sorts weights by their mesh, as AutoModel does for the gradient norm, then makes
    another number of collective calls than a rank that is in its first world, and both wait forever.
    """
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        if (clear := getattr(debug, name, None)) is not None:  # not every torch has both caches
            clear()


def rendezvous(world: int, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float) -> TCPStore:
    """Where ranks meet: port 0 keeps a new one, another joins the one that is kept there."""
    return TCPStore(
        host,
        port,
        world,
        is_master=port == 0,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
