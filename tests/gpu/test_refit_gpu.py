"""On a GPU machine: refits of real engines, checked byte by byte; the way back, kept plans, loans.

One GPU: transport `cuda_ipc`. Two: `nccl` too, the trainer's half on the first and the engine on the second; and an engine of
two ranks, one on the trainer's GPU, which cut slices out of what is lent. Three: one of two ranks that are sent slices.
Run: python -m pytest tests/gpu/test_refit_gpu.py -m gpu
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from omnifleet.auth import OPEN
from omnifleet.client.refit import RefitClient
from omnifleet.config.services import RolloutConfig
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire.server import serving
from omnifleet_refit.group import Meeting
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.courier import Courier, Order
from omnifleet_trainer.refit.guard import Canary, Guard
from omnifleet_trainer.refit.lender import lend
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot
from tests.gpu.refit_engine import ENGINE, checkpoint, engine_on, logprobs_of, moved, nudged, refit_client
from tests.refit_registry import Registry

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
DEVICE, TRANSPORT = torch.device("cuda", 0), "cuda_ipc"
DEADLINE_S = 60.0
PROMPT, REPLY = (50, 51, 52, 53), (60, 61, 62)
TOLERANCE = 0.1
"""Nats: bfloat16 in the engine against float32."""


async def staged(client: RefitClient, snapshot: Snapshot, shipment: Shipment, courier: Courier | None) -> str:
    buckets = snapshot.contents(shipment)
    if courier is not None:
        outcome = (await courier.stage({"w": Order(client, shipment)}, buckets, DEADLINE_S))["w"]
        assert isinstance(outcome, str), outcome
        return outcome
    return await client.stage(shipment.manifest, lend(buckets), deadline_s=DEADLINE_S)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "NCL_03_tied"])
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_every_byte_is_what_a_fresh_engine_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, tied: bool
) -> None:
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, exported = tmp_path / "model", tmp_path / "exported"
    weights = checkpoint(model, tied=tied)
    trains = {name for name in weights if not name.startswith("visual.")}
    async with (
        engine_on("1" if transport == "nccl" else "0", model) as engine,
        refit_client(engine) as client,
    ):
        assert transport in (await client.describe()).transports
        device = torch.device("cuda", 0)
        snapshot = Snapshot(device, 1 << 20)
        courier = Courier(Meeting("127.0.0.1"), device) if transport == "nccl" else None
        parent, held, now = None, None, weights
        sparse_too = engine.facts.sparse
        for step in range(4 if sparse_too else 3):
            few = step == 3
            now = nudged(now, trains) if few else moved(weights, step, trains)
            snapshot.pack(((name, t.to(device)) for name, t in now.items()), trains, sparse=True)
            version = WeightVersion("r", "l", step)
            shipment = snapshot.shipment(version, parent, held, encoder_changed=parent is None)
            if few:
                whole, sparse = shipment.bytes, snapshot.step_on(version, parent, held, encoder_changed=False)
                assert sparse is not None and 2 * sparse.bytes <= whole
                shipment = sparse
            digest = await staged(client, snapshot, shipment, courier)
            commit = await client.commit(digest, InFlight.RECOMPUTE, deadline_s=DEADLINE_S)
            parent, held = commit.version, dict(snapshot.digests)
        assert (await engine._rpc("omni_counters"))["refits_by_plan"] == 2 + sparse_too, (
            "the first is checked by the loader"
        )
        ours = await engine._rpc("omni_digests")
        if courier is not None:
            courier.close()
    shutil.copytree(model, exported)
    save_file(now, exported / "model.safetensors", metadata={"format": "pt"})
    async with engine_on("0", exported) as fresh:
        theirs = await fresh._rpc("omni_digests")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert len(list((tmp_path / "cache" / "omnifleet" / "refit-plans").iterdir())) == 1, (
        "the checked plan is kept"
    )
    assert sparse_too, "all sources can be put together again from parameter memory"


class Joined:
    """A worker around an engine, as the registry shows it."""

    def __init__(self, id: str, engine: Any) -> None:
        from omnifleet_rollout.worker.command import Worker

        self.id, self.engine, self.address = id, engine, ""
        self.worker = Worker(engine, id, RolloutConfig.model_validate({"engine": ENGINE}), OPEN)

    @property
    def fenced(self) -> bool:
        return bool(self.worker.standing.fence)

    @property
    def version(self) -> WeightVersion:
        return self.worker.standing.version

    async def digests(self) -> Any:
        """Of all tensors that hang on the engine's model."""
        return await self.engine._rpc("omni_digests")

    async def by_plan(self) -> float:
        return float((await self.engine._rpc("omni_counters"))["refits_by_plan"])


@dataclass
class Fleet:
    """Engines, a sender on the first GPU, and what the trainer believes its weights to be. gpus, settings: of an engine."""

    folder: Path
    weights: dict[str, Any]
    registry: Registry
    sender: BroadcastSender
    gpus: str = "0"
    settings: dict[str, Any] = field(default_factory=dict)
    workers: list[Joined] = field(default_factory=list)
    step: int = 0
    believed: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> set[str]:
        return {name for name in self.weights if not name.startswith("visual.")}

    async def publish(self, **wrong: torch.Tensor) -> Any:
        """The next version. wrong: tensors that go to the engines, and that the trainer does not believe to have."""
        self.step += 1
        self.believed = moved(self.weights, self.step, self.trains)
        sent = {name: t.to(DEVICE) for name, t in (self.believed | wrong).items()}
        return await self.sender.publish(self.step, iter(sent.items()), self.trains, encoder_changed=False)

    async def expect(self, batch: Any) -> list[float]:
        return logprobs_of(self.folder / "scored", self.believed, PROMPT, REPLY)

    @asynccontextmanager
    async def joined(self, name: str) -> AsyncIterator[Joined]:
        async with engine_on(self.gpus, self.folder / "model", **self.settings) as engine:
            joined = Joined(name, engine)
            async with serving(
                "127.0.0.1:0", joined.worker.register, tokens=OPEN, knob="test", grace_s=0
            ) as joined.address:
                self.registry.workers[name] = joined
                self.workers.append(joined)
                try:
                    yield joined
                finally:
                    self.workers.remove(joined)
                    del self.registry.workers[name]


@asynccontextmanager
async def fleet_in(folder: Path, transport: str, *, ranks: int = 1, **placed: Any) -> AsyncIterator[Fleet]:
    """A fleet without workers; what it keeps is in `folder`."""
    weights, registry = checkpoint(folder / "model", tied=False, ranks=ranks), Registry()

    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        address = await stack.enter_async_context(registry.served())
        sender = await stack.enter_async_context(
            BroadcastSender.connect(
                address,
                "",
                run="r",
                lineage="l",
                device=DEVICE,
                transport=transport,
                host="127.0.0.1",
                device_bucket_bytes=1 << 20,
            )
        )
        yield Fleet(folder, weights, registry, sender, **placed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One worker whose plan was recorded, checked and kept: it has had two versions."""
    folder = tmp_path_factory.mktemp("fleet")
    async with fleet_in(folder, TRANSPORT) as fleet:
        shutil.copytree(folder / "model", folder / "scored")
        fleet.sender.guard = Guard(Canary(PROMPT, REPLY, TOLERANCE), "", fleet.expect)
        async with fleet.joined("first"):
            for _ in range(2):
                report = await fleet.publish()
                assert report.ok == ("first",), report.failed
            yield fleet


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_that_the_canary_tells_against_is_put_back_byte_for_byte(fleet: Fleet) -> None:
    (worker,) = fleet.workers
    before, was = await worker.digests(), worker.version.number
    head = fleet.weights["lm_head.weight"]
    report = await fleet.publish(**{"lm_head.weight": torch.randn_like(head.float()).to(head.dtype)})
    assert f":{was} again" in report.failed["first"], report.failed
    assert not worker.fenced and worker.version.number == was
    assert await worker.digests() == before
    assert worker.worker.counters.count("refits_rolled_back") == 1
    report = await fleet.publish()
    assert report.ok == ("first",), report.failed
    assert worker.version.number == was + 2 and await worker.digests() != before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_second_engine_begins_with_the_kept_plan_and_takes_its_weights_from_the_first(
    fleet: Fleet,
) -> None:
    from omnifleet_rollout.refit.borrowing import borrowed

    (first,) = fleet.workers
    plans = list((fleet.folder / "cache" / "omnifleet" / "refit-plans").iterdir())
    assert len(plans) == 1 and await first.by_plan() >= 1, "its first refit was checked by the loader"
    table = {spec.name: (spec.dtype, list(spec.shape)) for spec in first.engine.facts.tensors}
    async with fleet.joined("second") as second:
        async with (
            RefitClient.open(first.address) as lender,
            borrowed(lender, first.version, table) as weights,
        ):
            digest = await second.worker.receiver.adopt(
                first.version, weights.original, weights.manifest, str(weights.path)
            )
            await second.worker.receiver.commit(digest, InFlight.RECOMPUTE, DEADLINE_S)
        assert second.version == first.version, "the very version, digest and all"
        assert await second.by_plan() == 1, "a plan that is believed from the start"
        assert await second.digests() == await first.digests()
        report = await fleet.publish()
        assert report.ok == ("first", "second"), report.failed
        assert await second.digests() == await first.digests()
        assert await second.by_plan() == 2


@pytest.mark.parametrize(("transport", "gpus"), [("cuda_ipc", "0,1"), ("nccl", "1,2")])
async def test_two_ranks_take_slices_and_hold_what_fresh_ranks_load(
    tmp_path: Path, transport: str, gpus: str
) -> None:
    if torch.cuda.device_count() <= int(gpus[-1]):
        pytest.skip("needs two GPUs, for nccl three")
    two = {"tensor_parallel_size": 2}
    async with fleet_in(tmp_path, transport, ranks=2, gpus=gpus, settings=two) as fleet:
        async with fleet.joined("two") as worker:
            for step in range(3):
                report = await fleet.publish()
                assert report.ok == ("two",), report.failed
                _, manifest = worker.worker.receiver.serves()
                assert manifest is not None and bool(manifest.parts) == (step > 0), (
                    "the first is the loader's"
                )
            ours = await worker.engine._rpc_all("omni_digests")
        shutil.copytree(tmp_path / "model", tmp_path / "exported")
        save_file(fleet.believed, tmp_path / "exported" / "model.safetensors", metadata={"format": "pt"})
        async with engine_on(gpus, tmp_path / "exported", **two) as fresh:
            theirs = await fresh._rpc_all("omni_digests")
    assert len(ours) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert [name for name in mine if mine[name] != other[name]] == []
