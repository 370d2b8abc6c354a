"""Deltas of few values over `shm`: small on the wire, the same bytes in the end, and dense where that is smaller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.auth import OPEN
from omnifleet.client.refit import File
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.server import serving
from omnifleet.wire.sparse import ENCODING
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.worker.gate import Gate
from omnifleet_rollout.worker.server import RefitServicer
from omnifleet_rollout.worker.standing import Standing
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.release import Parcel, add_step, first_release, next_release
from omnifleet_trainer.refit.sender import RefitSender
from tests.refit_model import tensors as small_tensors
from tests.refit_model import write_checkpoint
from tests.refit_registry import Registry
from tests.refit_world import DEADLINE_S, Receiving, receiving

SHM = Path("/dev/shm")
ROWS, COLUMNS = 256, 1024
NAMES = ("a", "b", "frozen")
BYTES = ROWS * COLUMNS * 4
TABLE = tuple(
    refit_pb2.TensorSpec(name=name, dtype="F32", shape=(ROWS, COLUMNS), bytes=BYTES) for name in NAMES
)


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Three matrices of 1 MiB. Each step changes 100 values of `a` and 1,000 of `b`, some of them more than once."""
    generator = np.random.default_rng(7)
    made = {name: generator.standard_normal((ROWS, COLUMNS)).astype(np.float32) for name in NAMES}
    for number in range(1, step + 1):
        moved = np.random.default_rng(number)
        for name, count in (("a", 100), ("b", 1000)):
            made[name].reshape(-1)[moved.integers(0, made[name].size, count)] += 1
    return made


class Held:
    """A worker with a fake engine, as the registry shows it. sparse: it says that it takes sparse tensors."""

    def __init__(self, id: str, *, sparse: bool) -> None:
        self.id, self.address = id, ""
        self.engine = FakeEngine(table=TABLE)
        self.engine._facts = replace(self.engine._facts, sparse=sparse)
        self.gate = Gate(Standing(id, base_version(TABLE)), limit=8)
        self.counters = Counters(id)
        self.receiver = Receiver(self.engine, self.gate, self.counters)

    @property
    def fenced(self) -> bool:
        return bool(self.gate.standing.fence)

    @property
    def version(self) -> WeightVersion:
        return self.gate.standing.version

    def holds(self, step: int) -> bool:
        same = all(self.engine.weights[name] == value.tobytes() for name, value in weights(step).items())
        return same and self.version.number == step and not self.fenced

    def register(self, server: object) -> None:
        servicer = RefitServicer(self.engine, self.receiver, self.gate)
        refit_pb2_grpc.add_RefitServicer_to_server(servicer, server)


@asynccontextmanager
async def fleet(*workers: Held, shm: Path = SHM, **settings: Any) -> AsyncIterator[RefitSender]:
    registry = Registry()

    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.engine.start()
            worker.address = await stack.enter_async_context(
                serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="test", grace_s=0)
            )
            registry.workers[worker.id] = worker
        address = await stack.enter_async_context(registry.served())
        options = {"run": "r", "lineage": "l", "bucket_bytes": 1 << 20, "timeout_s": 20.0} | settings
        yield await stack.enter_async_context(FileSender.open(address, "", **options))


async def publish(sender: RefitSender, step: int) -> Any:
    report = await sender.publish(step, iter(weights(step).items()), {"a", "b"}, encoder_changed=False)
    assert not report.failed
    return report


async def test_few_values_cost_few_bytes_and_give_the_same_weights() -> None:
    workers = [Held(f"w{i}", sparse=True) for i in range(3)]
    async with fleet(*workers) as sender:
        whole = await publish(sender, 0)
        assert whole.bytes == 3 * BYTES
        for step in range(1, 5):
            report = await publish(sender, step)
            assert report.bytes < 8 * 1100 + 256, "an index and a value each"
            assert all(worker.holds(step) for worker in workers)


async def test_a_worker_that_keeps_no_bytes_or_missed_a_version_takes_the_tensors_whole() -> None:
    able, unable = Held("able", sparse=True), Held("unable", sparse=False)
    async with fleet(able, unable) as sender:
        await publish(sender, 0)
        assert (await publish(sender, 1)).bytes == 2 * BYTES
        assert able.holds(1) and unable.holds(1)
        before = able.counters.count("refit_bytes")
        await publish(sender, 2)
        assert able.counters.count("refit_bytes") - before == 2 * BYTES, "what was staged, whole"
        assert able.holds(2) and unable.holds(2)
    async with fleet(able, lineage="off", sparse=False) as sender:
        await publish(sender, 0)
        assert (await publish(sender, 1)).bytes == 2 * BYTES and able.holds(1)


@pytest.fixture
def parcels() -> Any:
    """A complete parcel of step 0 and a sparse one on top of it, of the small model; their files go in the end."""
    old = small_tensors(0)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["q"][3, 5] += 1
    new["expert.1"][0, 0] = float("nan")
    first = first_release(WeightVersion("r", "l", 0), old.items(), SHM, 1 << 12)
    second = next_release(WeightVersion("r", "l", 1), first.base, new.items(), set(new), False, SHM, 1 << 12)
    add_step(second, first, SHM, 1 << 12)
    yield first, second
    second.retire()
    first.base.retire()


async def send(worker: Receiving, parcel: Parcel) -> None:
    digest = await worker.client.stage(
        parcel.manifest, File(parcel.transfer.path, parcel.transfer.size), deadline_s=DEADLINE_S
    )
    await worker.client.commit(digest, InFlight.KEEP, deadline_s=DEADLINE_S)


async def test_a_sparse_step_is_proved_whole_and_every_damage_to_it_is_refused_by_three_workers(
    tmp_path: Path, parcels: Any
) -> None:
    first, second = parcels
    async with receiving(write_checkpoint(tmp_path / "c"), 3, planned=False) as workers:
        for worker in workers:
            await send(worker, first.complete())
        held = workers[0].version
        parcel = second.on_top_of(held, sparse=True)
        specs = {spec.name: spec for spec in parcel.manifest.tensors}
        assert {n for n, s in specs.items() if s.encoding == ENCODING} == {"q", "expert.1"}
        assert specs["q"].stored == 8 and specs["q"].bytes == 256 and parcel.transfer.size == 128

        def told(change: Any) -> refit_pb2.Manifest:
            manifest = refit_pb2.Manifest()
            manifest.CopyFrom(parcel.manifest)
            change(manifest, next(t for t in manifest.tensors if t.name == "q"))
            return manifest

        def digest(m: refit_pb2.Manifest, t: refit_pb2.TensorSpec) -> None:
            t.digest = "0" * 64

        def encoding(m: refit_pb2.Manifest, t: refit_pb2.TensorSpec) -> None:
            t.encoding = "sparse-9"

        def stored(m: refit_pb2.Manifest, t: refit_pb2.TensorSpec) -> None:
            t.stored = 7

        def beyond(m: refit_pb2.Manifest, t: refit_pb2.TensorSpec) -> None:
            t.stored = 1 << 30

        def orphan(m: refit_pb2.Manifest, t: refit_pb2.TensorSpec) -> None:
            m.ClearField("parent")
            for other in m.tensors:
                other.changed = True

        for change in (digest, encoding, stored, beyond, orphan):
            for worker in workers:
                with pytest.raises(OmnifleetError) as caught:
                    source = File(parcel.transfer.path, parcel.transfer.size)
                    await worker.client.stage(told(change), source, deadline_s=DEADLINE_S)
                assert caught.value.reason is Reason.REFIT_REJECTED, change.__name__
                assert worker.holds(0), change.__name__
        for worker in workers:
            await send(worker, parcel)
            model = worker.engine.model
            assert worker.version.number == 1
            assert model.qkv[3, 5] == small_tensors(0)["q"][3, 5] + 1
            assert model.experts[1, 0, 0].isnan(), "bits, not values"


async def test_an_engine_whose_bytes_lie_in_parameter_memory_refuses_a_sparse_tensor(
    tmp_path: Path, parcels: Any
) -> None:
    first, second = parcels
    async with receiving(write_checkpoint(tmp_path / "c"), 1) as (worker,):
        await send(worker, first.complete())
        await send(worker, first.complete())  # the second one goes by plan
        assert worker.engine.by_plan == [False, True]
        with pytest.raises(OmnifleetError, match="not kept here") as caught:
            await send(worker, second.on_top_of(worker.version, sparse=True))
        assert caught.value.reason is Reason.REFIT_REJECTED and worker.holds(0)


def test_a_tensor_whose_dtype_changed_goes_whole(tmp_path: Path) -> None:
    old = {name: np.zeros(4096, np.float32) for name in ("a", "b")}
    new = {"a": old["a"].astype(np.float16), "b": old["b"].copy()}
    new["b"][5] = 1
    first = first_release(WeightVersion("r", "l", 0), old.items(), tmp_path, 1 << 20)
    second = next_release(
        WeightVersion("r", "l", 1), first.base, new.items(), {"a", "b"}, False, tmp_path, 1 << 20
    )
    add_step(second, first, tmp_path, 1 << 20)
    assert second.step is not None
    assert {name: spec.encoding for name, spec in second.step.specs.items()} == {"a": "", "b": ENCODING}
    second.retire()
    first.base.retire()
