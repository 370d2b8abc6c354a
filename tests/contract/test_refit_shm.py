"""Transport `shm` with three light workers: a damaged file is refused by all of them, and the old version serves on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omnifleet.client.refit import File
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet_trainer.refit.release import Parcel, first_release
from tests.refit_model import tensors, write_checkpoint
from tests.refit_world import DEADLINE_S, Receiving, receiving

SHM = Path("/dev/shm")


@pytest.fixture
def parcel() -> Iterator[Callable[[int], Parcel]]:
    """Make complete parcels of steps, in buckets of at most 600 bytes; their files go in the end."""
    made = []

    def make(step: int) -> Parcel:
        release = first_release(WeightVersion("r", "l", step), tensors(step).items(), SHM, 600)
        made.append(release)
        return release.complete()

    yield make
    for release in made:
        release.base.retire()


async def publish(workers: list[Receiving], parcel: Parcel) -> None:
    for worker in workers:
        source = File(parcel.transfer.path, parcel.transfer.size)
        digest = await worker.client.stage(parcel.manifest, source, deadline_s=DEADLINE_S)
        await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)


def flip(parcel: Parcel) -> None:
    with parcel.transfer.path.open("r+b") as file:
        file.seek(parcel.transfer.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def truncate(parcel: Parcel) -> None:
    os.truncate(parcel.transfer.path, parcel.transfer.size - 64)


def swap_buckets(parcel: Parcel) -> None:
    sizes = [bucket.bytes for bucket in parcel.manifest.buckets]
    one, other = next((i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j])
    data = bytearray(parcel.transfer.path.read_bytes())
    a, b = sum(sizes[:one]), sum(sizes[:other])
    data[a : a + sizes[one]], data[b : b + sizes[one]] = data[b : b + sizes[one]], data[a : a + sizes[one]]
    parcel.transfer.path.write_bytes(data)


def number_buckets_anew(parcel: Parcel) -> None:
    parcel.manifest.buckets[0].index, parcel.manifest.buckets[1].index = 1, 0


def forget_a_tensor(parcel: Parcel) -> None:
    del parcel.manifest.tensors[0]


def name_a_stranger(parcel: Parcel) -> None:
    parcel.manifest.tensors[0].name = "stranger"


def name_one_twice(parcel: Parcel) -> None:
    parcel.manifest.tensors.append(parcel.manifest.tensors[1])


def change_a_dtype(parcel: Parcel) -> None:
    parcel.manifest.tensors[0].dtype = "I32"


def change_a_shape(parcel: Parcel) -> None:
    parcel.manifest.tensors[0].shape.reverse()


def leave_the_bucket(parcel: Parcel) -> None:
    parcel.manifest.tensors[0].offset = 1 << 20


def remove_the_file(parcel: Parcel) -> None:
    parcel.transfer.path.unlink()


def point_elsewhere(parcel: Parcel) -> None:
    parcel.transfer.path.unlink()
    parcel.transfer.path.symlink_to("/etc/passwd")


FAULTS = [
    flip,
    truncate,
    swap_buckets,
    number_buckets_anew,
    forget_a_tensor,
    name_a_stranger,
    name_one_twice,
    change_a_dtype,
    change_a_shape,
    leave_the_bucket,
    remove_the_file,
    point_elsewhere,
]


async def test_every_fault_is_refused_by_three_workers_and_the_next_whole_file_heals(
    tmp_path: Path, parcel: Callable[[int], Parcel]
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 3, planned=False) as workers:
        await publish(workers, parcel(0))
        for step, fault in enumerate(FAULTS, 1):
            damaged = parcel(step)
            fault(damaged)
            copy = refit_pb2.Manifest()
            copy.CopyFrom(damaged.manifest)
            for worker in workers:
                source = File(damaged.transfer.path, damaged.transfer.size)
                with pytest.raises(OmnifleetError) as caught:
                    await worker.client.stage(copy, source, deadline_s=DEADLINE_S)
                assert caught.value.reason is Reason.REFIT_REJECTED, fault.__name__
                assert worker.holds(0), fault.__name__
        await publish(workers, parcel(20))
        assert all(worker.holds(20) for worker in workers)


async def test_a_rank_keeps_of_a_file_the_slices_that_it_reads(
    tmp_path: Path, parcel: Callable[[int], Parcel]
) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1, ranks=((0, 2), (1, 2))) as (worker,):
        kept = []
        for step in range(2):
            made = parcel(step)
            source = File(made.transfer.path, made.transfer.size)
            digest = await worker.client.stage(made.manifest, source, deadline_s=DEADLINE_S)
            kept.append([stager._received.bytes for stager in worker.engine.stagers])
            await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)
            assert worker.holds(step)
        whole, halves = sum(tensor.nbytes for tensor in tensors(0).values()), 3 * 4 * 8 * 8 // 2
        assert kept == [[whole, whole], [whole - halves, whole - halves]], "half of q, k and v is the other's"
        assert worker.engine.by_plan == [False, True]
