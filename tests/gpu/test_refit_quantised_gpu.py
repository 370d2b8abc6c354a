"""On a GPU machine: a real engine that quantises its weights (fp8) takes refits by its loader, checked byte by byte.

One GPU, transport `cuda_ipc`. Run: python -m pytest tests/gpu/test_refit_quantised_gpu.py -m gpu
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omnifleet.client.refit import RefitClient
from omnifleet.types import InFlight, WeightVersion
from omnifleet_rollout.refit.shadow import LIMIT_ENV
from omnifleet_trainer.refit.courier import Order
from omnifleet_trainer.refit.lender import lend
from omnifleet_trainer.refit.snapshot import Snapshot
from tests.gpu.refit_engine import checkpoint, engine_on, moved, nudged, refit_client

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DEVICE = torch.device("cuda", 0)
DEADLINE_S = 60.0
FP8 = {"arguments": {"quantization": "fp8"}}


def quantised(digests: dict[str, str]) -> list[str]:
    """Names of the tensors that an engine holds in fp8."""
    return [name for name, says in digests.items() if says.startswith("torch.float8")]


async def digests_of_fresh(model: Path, weights: dict[str, Any], folder: Path) -> Any:
    """All that hangs on a fresh engine which loads these weights, and makes them small itself."""
    shutil.copytree(model, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    async with engine_on("0", folder, **FP8) as fresh:
        return await fresh._rpc("omni_digests")


async def test_a_quantised_engine_holds_what_a_fresh_one_makes_of_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    weights = checkpoint(model, tied=False)
    trains = {name for name in weights if not name.startswith("visual.")}
    async with engine_on("0", model, **FP8) as engine, refit_client(engine) as client:
        begun = await engine._rpc("omni_digests")
        snapshot, parent, held, now = Snapshot(DEVICE, 1 << 20), None, None, weights
        for step in range(4):
            few = step == 3
            now = nudged(now, trains) if few else moved(weights, step, trains)
            snapshot.pack(((name, t.to(DEVICE)) for name, t in now.items()), trains, sparse=True)
            version = WeightVersion("r", "l", step)
            shipment = snapshot.shipment(version, parent, held, encoder_changed=parent is None)
            if few:
                sparse = snapshot.step_on(version, parent, held, encoder_changed=False)
                assert sparse is not None
                shipment = sparse
            buckets = snapshot.contents(shipment)
            digest = await client.stage(shipment.manifest, lend(buckets), deadline_s=DEADLINE_S)
            commit = await client.commit(digest, InFlight.RECOMPUTE, deadline_s=DEADLINE_S)
            parent, held = commit.version, dict(snapshot.digests)
        assert (await engine._rpc("omni_counters"))["refits_by_plan"] == 0
        ours = await engine._rpc("omni_digests")
    theirs = await digests_of_fresh(model, now, tmp_path / "exported")
    assert quantised(ours) and ours.keys() == theirs.keys()
    assert [name for name in quantised(ours) if ours[name] == begun[name] and "visual" not in name] == []
    assert [name for name in ours if ours[name] != theirs[name]] == []


async def test_without_a_shadow_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(LIMIT_ENV, "4096")
    model = tmp_path / "model"
    weights = checkpoint(model, tied=False)
    trains = {name for name in weights if not name.startswith("visual.")}
    now = moved(weights, 1, trains)
    async with engine_on("0", model, **FP8) as engine, refit_client(engine) as client:
        await refitted_in_place(client, now, trains)
        ours = await engine._rpc("omni_digests")
    monkeypatch.delenv(LIMIT_ENV)
    theirs = await digests_of_fresh(model, now, tmp_path / "exported")
    assert quantised(ours) and ours == theirs


async def refitted_in_place(client: RefitClient, weights: dict[str, Any], trains: set[str]) -> None:
    snapshot = Snapshot(DEVICE, 1 << 20)
    snapshot.pack(((name, t.to(DEVICE)) for name, t in weights.items()), trains)
    shipment = snapshot.shipment(WeightVersion("r", "l", 1), None, None, True)
    source: Any = lend(snapshot.contents(shipment))
    outcome = await Order(client, shipment, 1, InFlight.RECOMPUTE).stage(source, DEADLINE_S)
    assert isinstance(outcome, str), outcome
