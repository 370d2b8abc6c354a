"""On a GPU machine: after refits every byte of the engine's memory is what a fresh engine loads from the exported weights.

One GPU: transport `cuda_ipc`. Two: `nccl` too, the trainer's half on the first and the engine on the second.
Run: python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.auth import OPEN
from omnifleet.client.refit import RefitClient
from omnifleet.config.services import RolloutConfig
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.server import serving
from omnifleet_refit.group import Meeting
from omnifleet_trainer.refit.courier import Courier, Order
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "enforce_eager": True,
    "threads": 2,
}
DEADLINE_S = 60.0


def checkpoint(out: Path, *, tied: bool) -> dict[str, Any]:
    """A tiny Qwen2-VL in bfloat16; its tensors."""
    from safetensors.torch import load_file, save_file

    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(out, seed=3, tie_embeddings=tied)
    weights = {name: t.bfloat16() for name, t in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return weights


def moved(weights: dict[str, Any], step: int, names: set[str]) -> dict[str, Any]:
    """The weights of a step: those named differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (t + 0.01 * torch.randn(t.shape, generator=generator)).bfloat16() if name in names else t
        for name, t in weights.items()
    }


@asynccontextmanager
async def engine_on(gpu: int, model: Path) -> AsyncIterator[Any]:
    from omnifleet_rollout.engine.vllm_engine import VllmEngine
    from omnifleet_rollout.engine.vllm_launch import set_environment

    async def no_media() -> str:
        raise RuntimeError("no media here")

    config = RolloutConfig.model_validate({"engine": ENGINE})
    set_environment(config.engine)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    engine = VllmEngine(model, config, find_media=no_media, secret="")
    try:
        await engine.start()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        yield engine
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        await engine.shutdown()


@asynccontextmanager
async def refit_client(engine: Any) -> AsyncIterator[RefitClient]:
    from omnifleet_rollout.refit.receiver import Receiver
    from omnifleet_rollout.worker.gate import Gate
    from omnifleet_rollout.worker.server import RefitServicer
    from omnifleet_rollout.worker.standing import Standing

    gate = Gate(Standing("w", base_version(engine.facts.tensors)), limit=8)
    servicer = RefitServicer(engine, Receiver(engine, gate, Counters("gpu")), gate)
    async with (
        serving(
            "127.0.0.1:0",
            lambda server: refit_pb2_grpc.add_RefitServicer_to_server(servicer, server),
            tokens=OPEN,
            knob="test",
            grace_s=0,
        ) as address,
        RefitClient.open(address) as client,
    ):
        yield client


async def staged(client: RefitClient, snapshot: Snapshot, shipment: Shipment, courier: Courier | None) -> str:
    buckets = [snapshot.buckets[i] for i in shipment.buckets]
    if courier is not None:
        outcome = (await courier.stage({"w": Order(client, shipment)}, buckets, DEADLINE_S))["w"]
        assert isinstance(outcome, str), outcome
        return outcome
    from omnifleet_trainer.refit.handles import handles

    return await client.stage(shipment.manifest, handles(buckets, snapshot.device), deadline_s=DEADLINE_S)


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
    async with engine_on(1 if transport == "nccl" else 0, model) as engine, refit_client(engine) as client:
        assert transport in (await client.describe()).transports
        device = torch.device("cuda", 0)
        snapshot = Snapshot(device, 1 << 20)
        courier = Courier(Meeting("127.0.0.1"), device) if transport == "nccl" else None
        parent, held = None, None
        for step in range(3):
            now = moved(weights, step, trains)
            snapshot.pack(((name, t.to(device)) for name, t in now.items()), trains)
            version = WeightVersion("r", "l", step)
            shipment = snapshot.shipment(version, parent, held, encoder_changed=parent is None)
            digest = await staged(client, snapshot, shipment, courier)
            commit = await client.commit(digest, InFlight.RECOMPUTE, deadline_s=DEADLINE_S)
            parent, held = commit.version, dict(snapshot.digests)
        assert (await engine._rpc("omni_counters"))["refits_by_plan"] == 2, (
            "the first is checked by the loader"
        )
        ours = await engine._rpc("omni_digests")
        if courier is not None:
            courier.close()
    shutil.copytree(model, exported)
    from safetensors.torch import save_file

    save_file(now, exported / "model.safetensors", metadata={"format": "pt"})
    async with engine_on(0, exported) as fresh:
        theirs = await fresh._rpc("omni_digests")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert len(list((tmp_path / "cache" / "omnifleet" / "refit-plans").iterdir())) == 1, (
        "the checked plan is kept"
    )
