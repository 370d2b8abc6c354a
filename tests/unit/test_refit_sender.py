"""The sender against workers and a registry in this process, over real gRPC and real shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.auth import OPEN
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.codec import version_from_wire, version_to_wire
from omnifleet.wire.manifest import bucket_checksum, bucket_starts, manifest_digest
from omnifleet.wire.server import serving
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.release import first_release, next_release
from omnifleet_trainer.refit.sender import RefitSender
from omnifleet_trainer.refit.transfer import PREFIX, Transfer, pack, raw_tensor, sweep
from tests.refit_registry import Registry
from tests.waiting import beside, until

Weights = dict[str, np.ndarray[Any, Any]]
BASE = WeightVersion("", "base", 0)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def weights(step: int, moved: tuple[str, ...] = ("b", "c")) -> Weights:
    return {
        name: np.arange(size, dtype=np.float32) + (step if name in moved else 0)
        for name, size in (("a", 300), ("b", 7), ("c", 40))
    }


@dataclass
class Worker(refit_pb2_grpc.RefitServicer):
    """A worker that keeps the receiver's promises in a few lines: verify, parent, fence, one version."""

    id: str
    held: Weights = field(default_factory=lambda: weights(0))
    version: WeightVersion = BASE
    fenced: bool = False
    staged: tuple[WeightVersion, Weights] | None = None
    bytes_read: list[int] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    fail_stage: Reason | None = None
    fail_commit: bool = False
    lose_reply: bool = False
    hold: asyncio.Event | None = None
    address: str = ""

    async def Describe(self, request: Any, context: Any) -> refit_pb2.DescribeReply:
        return refit_pb2.DescribeReply(version=version_to_wire(self.version), transports=["shm"], shadow=True)

    async def Stage(self, request: refit_pb2.StageRequest, context: Any) -> refit_pb2.StageReply:
        if self.hold is not None:
            await self.hold.wait()
        if self.fail_stage:
            raise OmnifleetError(self.fail_stage, "told to fail")
        m = request.manifest
        parent = version_from_wire(m.parent) if m.HasField("parent") else None
        if parent is not None and (self.fenced or parent != self.version):
            raise OmnifleetError(Reason.REFIT_REJECTED, f"builds on {parent}, serves {self.version}")
        assert {t.name for t in m.tensors} == set(self.held)
        data = read(request.shm.path)
        assert len(data) == request.shm.bytes
        starts = bucket_starts(b.bytes for b in m.buckets)
        for bucket, start in zip(m.buckets, starts[:-1], strict=True):
            if bucket_checksum(data[start : start + bucket.bytes]) != bucket.checksum:
                raise OmnifleetError(Reason.REFIT_REJECTED, "checksum")
        fresh = {} if parent is None else dict(self.held)
        for t in m.tensors:
            if t.changed:
                at = starts[t.bucket] + t.offset
                fresh[t.name] = np.frombuffer(data[at : at + t.bytes], np.float32).reshape(tuple(t.shape))
        digest = manifest_digest(m)
        version = version_from_wire(m.version)
        self.staged = WeightVersion(version.run, version.lineage, version.number, digest), fresh
        self.bytes_read.append(len(data))
        self.parents.append(str(parent or "none"))
        return refit_pb2.StageReply(bytes=len(data), manifest_digest=digest)

    async def Commit(self, request: refit_pb2.CommitRequest, context: Any) -> refit_pb2.CommitReply:
        assert self.staged is not None and self.staged[0].manifest_digest == request.manifest_digest
        if self.fail_commit:
            self.fenced, self.staged = True, None
            raise OmnifleetError(Reason.FENCED, "loading failed", retryable=True)
        (self.version, self.held), self.staged, self.fenced = self.staged, None, False
        if self.lose_reply:
            self.lose_reply = False
            raise OmnifleetError(Reason.UNAVAILABLE, "the reply was lost", retryable=True)
        return refit_pb2.CommitReply(
            version=version_to_wire(self.version),
            gate_seconds=0.25,
            in_flight=3,
            tensors_loaded=len(self.held),
        )

    async def Quarantine(self, request: Any, context: Any) -> refit_pb2.QuarantineReply:
        self.fenced = True
        self.quarantined.append(request.reason)
        return refit_pb2.QuarantineReply(version=version_to_wire(self.version))

    async def Abort(self, request: Any, context: Any) -> refit_pb2.AbortReply:
        self.staged = None
        return refit_pb2.AbortReply(version=version_to_wire(self.version))


@dataclass
class Fleet:
    registry: Registry
    sender: RefitSender
    shm: Path
    stack: AsyncExitStack

    async def join(self, worker: Worker) -> Worker:
        worker.address = await self.stack.enter_async_context(
            serving(
                "127.0.0.1:0",
                lambda server: refit_pb2_grpc.add_RefitServicer_to_server(worker, server),
                tokens=OPEN,
                knob="test",
                grace_s=0,
            )
        )
        self.registry.workers[worker.id] = worker
        self.registry.moved()
        return worker

    async def publish(self, number: int, changed: tuple[str, ...] = ("b", "c"), **named: Any) -> Any:
        tensors = iter(weights(number, changed).items())
        return await self.sender.publish(number, tensors, {"b", "c"}, encoder_changed=False, **named)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.shm.iterdir())


@asynccontextmanager
async def fleet_of(count: int, shm: Path, **settings: Any) -> AsyncIterator[Fleet]:
    registry = Registry()
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(registry.served())
        options = {
            "run": "r",
            "lineage": "l",
            "shm_dir": shm,
            "bucket_bytes": 256,
            "timeout_s": 5.0,
        } | settings
        sender = await stack.enter_async_context(FileSender.open(address, "", **options))
        fleet = Fleet(registry, sender, shm, stack)
        for i in range(count):
            await fleet.join(Worker(f"w{i}"))
        yield fleet


def holds(worker: Worker, number: int) -> bool:
    same = all(np.array_equal(worker.held[name], value) for name, value in weights(number).items())
    return same and worker.version.number == number and not worker.fenced


async def test_first_version_is_complete_and_later_ones_carry_what_changed(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        first = await fleet.publish(0)
        second = await fleet.publish(1)
        one, two = fleet.registry.workers.values()
        assert holds(one, 1) and holds(two, 1)
        assert first.ok == second.ok == ("w0", "w1") and not second.failed
        assert one.bytes_read == [first.bytes, second.bytes] and second.bytes < first.bytes / 5
        assert one.parents == ["none", "r/l:0"]
        assert second.gate_seconds == 0.25 and second.in_flight == 6
        assert fleet.registry.announced == [0, 1]
        assert len(fleet.files()) == 2  # the base and the delta
    assert fleet.files() == []


async def test_files_are_private_and_a_tensor_larger_than_a_bucket_has_its_own(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(0)
        (name,) = fleet.files()
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600 and name.startswith(f"{PREFIX}r-0")
        assert holds(fleet.registry.workers["w0"], 0)  # "a" has 1,200 bytes, a bucket 256


async def test_a_version_without_change_still_becomes_a_version(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(0)
        report = await fleet.publish(1, changed=())
        assert fleet.registry.workers["w0"].version.number == 1
        assert 0 < report.bytes <= 64


async def test_one_worker_fails_and_the_others_commit(tmp_path: Path) -> None:
    async with fleet_of(3, tmp_path) as fleet:
        await fleet.publish(0)
        bad = fleet.registry.workers["w1"]
        bad.fail_stage = Reason.REFIT_REJECTED
        report = await fleet.publish(1)
        assert report.ok == ("w0", "w2") and "told to fail" in report.failed["w1"]
        assert holds(bad, 0)
        bad.fail_stage = None
        async with beside(fleet.sender.keep_up()):
            await until(lambda: holds(bad, 1))


async def test_a_dead_worker_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        await fleet.publish(0)
        fleet.registry.workers["w1"].address = "127.0.0.1:1"
        report = await fleet.publish(1)
        assert report.ok == ("w0",) and list(report.failed) == ["w1"]


async def test_a_worker_that_does_not_answer_meets_its_deadline(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path, timeout_s=0.2) as fleet:
        await fleet.publish(0)
        slow = fleet.registry.workers["w1"]
        slow.hold = asyncio.Event()
        report = await fleet.publish(1)
        assert report.ok == ("w0",) and "deadline" in report.failed["w1"]
        assert report.seconds < 4
        slow.hold.set()


async def test_a_late_joiner_and_a_fenced_worker_get_a_complete_file(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        for number in range(3):
            await fleet.publish(number)
        async with beside(fleet.sender.keep_up()):
            late = await fleet.join(Worker("late", held=weights(9, ("a", "b", "c"))))
            await until(lambda: holds(late, 2))
            assert late.parents == ["none"]
            await until(lambda: not fleet.sender.catching_up.behind)
            old = fleet.registry.workers["w0"]
            old.fail_commit = True
            report = await fleet.publish(3)
            assert "late" in report.ok and "loading failed" in report.failed["w0"]
            old.fail_commit = False
            fleet.registry.moved()
            await until(lambda: holds(old, 3))
            assert old.parents[-1] == "none"
            await until(lambda: len(fleet.files()) == 2)
        await fleet.publish(4)
        assert holds(late, 4) and holds(old, 4)  # each on top of its own edition of version 3


async def test_a_lost_reply_is_found_out_by_asking(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(0)
        worker = fleet.registry.workers["w0"]
        worker.lose_reply = True
        report = await fleet.publish(1)
        assert "lost" in report.failed["w0"] and holds(worker, 1)
        staged = len(worker.parents)
        async with beside(fleet.sender.keep_up()):
            await fleet.publish(2)
        assert holds(worker, 2) and len(worker.parents) == staged + 1


async def test_a_worker_that_missed_versions_takes_the_newest_delta(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path) as fleet:
        await fleet.publish(0)
        missed = fleet.registry.workers["w1"]
        missed.fail_stage = Reason.UNAVAILABLE
        await fleet.publish(1, changed=("b",))
        await fleet.publish(2, changed=("b",))
        missed.fail_stage = None
        report = await fleet.publish(3)
        assert report.ok == ("w0", "w1") and holds(missed, 3)
        assert missed.parents[-1] == "r/l:0"


async def test_rolling_commits_take_turns(tmp_path: Path) -> None:
    async with fleet_of(3, tmp_path, rolling=True) as fleet:
        report = await fleet.publish(0)
        assert report.ok == ("w0", "w1", "w2")
        assert all(holds(worker, 0) for worker in fleet.registry.workers.values())


async def test_numbers_never_go_back_and_may_be_published_again(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(5)
        again = await fleet.publish(5)
        assert again.ok == ("w0",)
        with pytest.raises(OmnifleetError) as caught:
            await fleet.publish(4)
        assert caught.value.reason is Reason.CONFLICT


async def test_a_registry_that_forgot_the_version_is_told_again(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(0)
        async with beside(fleet.sender.keep_up()):
            fleet.registry.target = None
            fleet.registry.moved()
            await until(lambda: fleet.registry.target is not None)
        assert fleet.registry.announced[-1] == 0


def test_files_of_dead_senders_are_swept_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}gone-3-abcd"
    dead.write_bytes(b"x")
    living = pack(tmp_path, "here-1", [raw_tensor("a", np.ones(3, np.float32))], 1 << 20)
    assert sweep(tmp_path) == [dead]
    assert living.path.exists()
    living.retire()
    assert not list(tmp_path.iterdir())


def test_a_file_in_use_keeps_its_name_until_it_is_not(tmp_path: Path) -> None:
    transfer = pack(tmp_path, "r-1", [raw_tensor("a", np.ones(3, np.float32))], 1 << 20)
    with transfer.in_use():
        transfer.retire()
        assert transfer.path.exists()
    assert not transfer.path.exists()


def test_what_a_failing_iterator_wrote_is_removed(tmp_path: Path) -> None:
    def tensors() -> Iterator[Any]:
        yield raw_tensor("a", np.ones(3, np.float32))
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="device"):
        pack(tmp_path, "r-1", tensors(), 1 << 20)
    assert not list(tmp_path.iterdir())


def test_torch_and_numpy_tensors_have_the_same_bytes() -> None:
    import torch

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    ours, theirs = raw_tensor("x", values), raw_tensor("x", torch.from_numpy(values))
    assert (ours.dtype, ours.shape, bytes(ours.data)) == (theirs.dtype, theirs.shape, bytes(theirs.data))
    half = raw_tensor("x", torch.tensor([1.00390625, 1.01171875, 0.1]).bfloat16())
    assert half.dtype == "BF16" and half.data.nbytes == 6
    back = torch.frombuffer(bytearray(half.data), dtype=torch.bfloat16).float().tolist()
    assert back == [1.0, 1.015625, 0.10009765625]  # NCL-11: round to nearest even


def test_a_file_that_was_composed_for_nobody_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = WeightVersion("r", "l", 0)
    first = first_release(base, weights(0).items(), tmp_path, 1 << 20)
    changed = {"b", "c"}
    second = next_release(
        WeightVersion("r", "l", 1), first.base, weights(1).items(), changed, False, tmp_path, 1 << 20
    )

    def pack_while_the_sender_closes(*arguments: Any) -> Transfer:
        transfer = pack(*arguments)
        second.retire()
        return transfer

    monkeypatch.setattr("omnifleet_trainer.refit.release.pack", pack_while_the_sender_closes)
    second.compose(tmp_path, 1 << 20)
    first.base.retire()
    assert list(tmp_path.iterdir()) == []


async def test_a_close_that_is_cancelled_leaves_no_files(tmp_path: Path) -> None:
    async with fleet_of(1, tmp_path) as fleet:
        await fleet.publish(0)

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)

        stuck = fleet.sender.catching_up.behind["w"] = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        closing = asyncio.create_task(fleet.sender.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, stuck, return_exceptions=True)
        assert fleet.files() == []
