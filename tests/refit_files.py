"""The sender's half of refits by file, in this process or in one to be killed: complete files, as any worker takes them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from omnifleet.client.refit import File, RefitClient
from omnifleet.types import InFlight, WeightVersion
from omnifleet_trainer.refit.release import Parcel, Release, first_release
from tests.refit_model import tensors
from tests.refit_world import DEADLINE_S, Receiving, Remote

BUCKET_BYTES = 600


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in shared memory that is gone after the test, whoever left files there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"omnifleet-test-{os.getpid()}-") as folder:
        yield Path(folder)


class FileSender:
    """Makes files of steps in a folder of shared memory, and hands them to workers."""

    def __init__(self, lineage: str, folder: Path) -> None:
        self.lineage, self._folder = lineage, folder
        self._made: list[Release] = []

    def pack(self, step: int) -> Parcel:
        """Write the version of a step."""
        version = WeightVersion("r", self.lineage, step)
        self._made.append(first_release(version, tensors(step).items(), self._folder, BUCKET_BYTES))
        return self._made[-1].complete()

    async def stage(
        self, worker: Receiving | Remote, parcel: Parcel, in_place: InFlight | None = None
    ) -> str:
        """The digest of what is staged. Raises what the worker says."""
        source = File(parcel.transfer.path, parcel.transfer.size)
        return await worker.client.stage(parcel.manifest, source, deadline_s=DEADLINE_S, in_place=in_place)

    async def send(self, worker: Receiving | Remote, parcel: Parcel) -> None:
        """Stage and commit. Raises what the worker says."""
        digest = await self.stage(worker, parcel)
        await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)

    async def publish(self, workers: Sequence[Receiving | Remote], step: int) -> None:
        """Write a step, then send it to one after another. Raises what any worker says."""
        parcel = self.pack(step)
        for worker in workers:
            await self.send(worker, parcel)

    def close(self) -> None:
        """Remove the files."""
        for release in self._made:
            release.base.retire()


def run_file_sender(addresses: dict[str, str], folder: str, step: int, phase: str, pipe: Any) -> None:
    """A sender that publishes step 0, then `step`, and says `phase` when it is there; it goes on when it is told to."""

    def reached(now: str) -> None:
        if now == phase:
            pipe.send(now)
            pipe.recv()

    async def send() -> None:
        async with AsyncExitStack() as stack:
            workers = []
            for id, address in addresses.items():
                client = await stack.enter_async_context(RefitClient.open(address))
                workers.append(Remote(id, None, client))
            sender = FileSender(f"killed {phase}", Path(folder))
            await sender.publish(workers, 0)
            parcel = sender.pack(step)
            reached("written")
            digests = {}
            for worker in workers:
                digests[worker.id] = await sender.stage(worker, parcel)
                reached("staged one")
            for worker in workers:
                await worker.client.commit(digests[worker.id], InFlight.KEEP, deadline_s=DEADLINE_S)
                reached("committed one")

    asyncio.run(send())
