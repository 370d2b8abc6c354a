"""A policy of many ranks: this process is the first, the others are processes that it starts and that end with it, or that
come from other nodes (nodes.py).

Ranks are equal: each builds the same backend and makes the same calls, and they meet inside them (torch.distributed).
The first tells the others which call comes next, and gives each the samples and pixels that it trains. When one is lost
the world is broken: the call in hand fails with a retryable error, so do all later ones, and whoever watches over the run
starts it again from its checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from omnifleet.config.parallel import ParallelConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.shares import shard, shares, updates_of
from omnifleet_trainer.batch.wire import encode
from omnifleet_trainer.policy.folder import finish_folder
from omnifleet_trainer.policy.followers import Followers
from omnifleet_trainer.policy.group import Place, rendezvous
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.policy.mismatch import OnMismatch
from omnifleet_trainer.policy.nodes import Meeting
from omnifleet_trainer.policy.sharing import SharingFollowers

log = logging.getLogger("omnifleet.trainer")
_LEAVE_S = 10.0


class WorldPolicy:
    """`Policy` over `job.trainer.parallel.world` ranks. Raises what a rank raises, and OmnifleetError(UNAVAILABLE,
    retryable) once a rank is lost."""

    def __init__(
        self, job: Job, *, on_mismatch: OnMismatch | None = None, meeting: Meeting | None = None
    ) -> None:
        """meeting: needed where ranks live on several nodes."""
        self._job, self._parallel = job, job.trainer.parallel
        world, timeout_s = self._parallel.world, self._parallel.timeout_s
        host = "127.0.0.1"
        if self._parallel.nodes > 1:
            if meeting is None:
                raise invalid(
                    "a policy on several nodes needs a run's folder to meet in",
                    knob="trainer.parallel.nodes",
                    reason=Reason.INVALID_CONFIG,
                )
            host = meeting.address()
        store = rendezvous(world, host=host, timeout_s=timeout_s)
        first = Place(0, world, store.port, timeout_s, host, world // self._parallel.nodes)
        self._world = Followers(job, first, tells_mismatches=on_mismatch is not None, meeting=meeting)
        try:
            self._rank = self._world.along(
                self._world.opened, lambda: open_rank(job, first, store, on_mismatch)
            )
        except BaseException:
            self._world.kill()
            raise
        self.encoder_trains = self._rank.encoder_trains
        self.others = SharingFollowers(self._parallel.world - 1, self._world.told)
        """The other ranks, as senders of weights."""

    def describe(self) -> dict[str, str]:
        """See `Policy`."""
        return self._rank.describe()

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        return self._rank.trainable_names()

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`."""
        dealt = shares(batch, range(len(batch.samples)), self._parallel.dp)
        call = self._world.call("logprobs", payloads(batch, dealt, self._parallel))
        return self._world.along(call, lambda: self._rank.logprobs(batch))

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`."""
        dealt: list[list[int]] = [[] for _ in range(self._parallel.dp)]
        for update in updates_of(batch, self._job.trainer.batch_samples):
            for mine, rows in zip(dealt, shares(batch, update, self._parallel.dp), strict=True):
                mine += rows
        call = self._world.call("train", payloads(batch, dealt, self._parallel))
        return self._world.along(call, lambda: self._rank.train(batch))

    def export(self, keep: Sequence[Collection[str]] = ()) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`. The ranks make each tensor whole together; one who stops early waits for the rest all the same.

        keep: of each other rank, names of tensors that it keeps a copy of, to send them.
        """
        call = self._world.call("export", own=[{"keep": sorted(names)} for names in keep])
        tensors = self._rank.export()
        try:
            while (item := self._world.guarded(lambda: next(tensors, None))) is not None:
                yield item
        finally:
            self._world.along(call, lambda: [None for _ in tensors])

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`; each rank copies and writes its share of the tensors."""
        call = self._world.call("snapshot")
        own = self._world.along(call, self._rank.snapshot)

        def write(folder: Path) -> None:
            writing = self._world.call("write", snapshot=call.id, folder=str(folder))
            own(folder)
            self._world.settle(writing)
            finish_folder(folder / "policy", self._job.source)

        return write

    def save(self, folder: Path) -> None:
        """See `Policy`."""
        self.snapshot()(folder)

    def load(self, folder: Path) -> None:
        """See `Policy`; of however many ranks the folder is."""
        call = self._world.call("load", folder=str(folder))
        self._world.along(call, lambda: self._rank.load(folder))

    def offload(self) -> None:
        """See `Policy`."""
        self._world.along(self._world.call("offload"), self._rank.offload)

    def onload(self) -> None:
        """See `Policy`."""
        self._world.along(self._world.call("onload"), self._rank.onload)

    def close(self) -> None:
        """See `Policy`."""
        if self._world.closed:
            return
        try:
            if self._world.whole:
                self._world.along(self._world.call("close"), self._rank.close)
            else:
                self._rank.close()
        except (OmnifleetError, RuntimeError) as error:
            log.warning("the policy's ranks did not part in order: %s", error)
        finally:
            self._world.kill(after_s=_LEAVE_S if self._world.whole else 0.0)


def payloads(batch: StepBatch, dealt: list[list[int]], parallel: ParallelConfig) -> list[bytes]:
    """The step of each follower, by rank - 1. dealt: rows of each data rank; ranks that share it get the same."""
    of = [parallel.data_rank(rank) for rank in range(1, parallel.world)]
    parts = {i: encode(shard(batch, dealt[i])) for i in set(of)}
    return [parts[i] for i in of]
