"""On a GPU machine: real engines that may not have a shadow take refits straight into place, checked byte by byte.

One GPU: transport `cuda_ipc`. Two: `nccl` too, the trainer's half on the first and the engine on the second.
Run: python -m pytest tests/gpu/test_refit_no_shadow_gpu.py -m gpu
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, InFlight, Sampling, WeightVersion
from omnifleet_refit.group import Meeting
from omnifleet_rollout.engine.port import EngineRequest
from omnifleet_rollout.refit.shadow import LIMIT_ENV
from omnifleet_trainer.refit.courier import Courier, Order, Outcome
from omnifleet_trainer.refit.lender import lend
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot
from tests.gpu.refit_engine import checkpoint, engine_on, moved, refit_client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
DEVICE = torch.device("cuda", 0)
DEADLINE_S = 30.0
LAST = 3
TOKENS = 400


class Trainer:
    """The sender's half: packs steps, stages them in place on one worker."""

    def __init__(self, transport: str, weights: dict[str, Any]) -> None:
        self.trains = {name for name in weights if not name.startswith("visual.")}
        self._weights, self._snapshot = weights, Snapshot(DEVICE, 1 << 20)
        self.courier = Courier(Meeting("127.0.0.1"), DEVICE) if transport == "nccl" else None

    def pack(self, step: int) -> Shipment:
        now = moved(self._weights, step, self.trains)
        self._snapshot.pack(((name, t.to(DEVICE)) for name, t in now.items()), self.trains)
        return self._snapshot.shipment(WeightVersion("r", "l", step), None, None, True)

    async def stage(
        self,
        client: RefitClient,
        shipment: Shipment,
        *,
        in_place: InFlight | None = InFlight.RECOMPUTE,
        flipped: bool = False,
    ) -> Outcome:
        """flipped: a byte of the last bucket is another than its checksum says."""
        buckets = self._snapshot.contents(shipment)
        assert len(buckets) > 1
        if flipped:
            wrong = buckets[-1].clone()
            wrong[0] ^= 1
            buckets = [*buckets[:-1], wrong]
        order = Order(client, shipment, 1, in_place)
        if self.courier is not None:
            return (await self.courier.stage({"w": order}, buckets, DEADLINE_S))["w"]
        try:
            return await order.stage(lend(buckets), DEADLINE_S)
        except OmnifleetError as error:
            return error


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    """A checkpoint, its weights, and all that hangs on a fresh engine of its last step."""
    folder = tmp_path_factory.mktemp("oracle")
    weights = checkpoint(folder / "model", tied=False)
    shutil.copytree(folder / "model", folder / "exported")
    last = moved(weights, LAST, {name for name in weights if not name.startswith("visual.")})
    save_file(last, folder / "exported" / "model.safetensors", metadata={"format": "pt"})
    async with engine_on("0", folder / "exported") as fresh:
        return folder / "model", weights, await fresh._rpc("omni_digests")


async def reply(engine: Any, begun: asyncio.Event) -> tuple[int, FinishReason | None]:
    """Tokens of one long sample, and how it ended."""
    prompt = await engine.prepare([50, 51, 52], (), "test")
    sampling = Sampling(max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
    tokens, finish = 0, None
    async for delta in engine.generate(EngineRequest("long", prompt, sampling, salt="s")):
        tokens, finish = tokens + len(delta.token_ids), delta.finish
        begun.set()
    return tokens, finish


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_without_a_shadow_every_byte_is_what_a_fresh_engine_loads(
    oracle: tuple[Path, dict[str, Any], Any], tmp_path: Path, transport: str
) -> None:
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, weights, theirs = oracle
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setenv(LIMIT_ENV, "4096")
        async with (
            engine_on("1" if transport == "nccl" else "0", model) as engine,
            refit_client(engine) as client,
        ):
            trainer = Trainer(transport, weights)
            first = trainer.pack(0)
            refused = await trainer.stage(client, first, in_place=None)
            assert isinstance(refused, OmnifleetError) and refused.reason is Reason.NO_ROOM, refused
            assert not (await client.describe()).shadow
            # By the loader, which the plan is checked against; then by plan, while a reply runs; then half of one.
            digest = await trainer.stage(client, first)
            assert isinstance(digest, str), digest
            assert (
                await client.commit(digest, InFlight.RECOMPUTE, deadline_s=DEADLINE_S)
            ).version.number == 0
            assert engine.needs(), "the plan is believed"
            begun = asyncio.Event()
            replying = asyncio.create_task(reply(engine, begun))
            await begun.wait()
            digest = await trainer.stage(client, trainer.pack(1))
            assert isinstance(digest, str), digest
            assert await replying == (TOKENS, FinishReason.LENGTH)
            broken = await trainer.stage(client, trainer.pack(2), flipped=True)
            assert isinstance(broken, OmnifleetError) and broken.reason is Reason.FENCED, broken
            assert "checksum" in broken.message
            on_top = trainer.pack(LAST)
            spoilt = replace(on_top, manifest=type(on_top.manifest)())
            spoilt.manifest.CopyFrom(on_top.manifest)
            spoilt.manifest.parent.CopyFrom(on_top.manifest.version)
            refused = await trainer.stage(client, spoilt)
            assert isinstance(refused, OmnifleetError) and "complete refit" in refused.message
            digest = await trainer.stage(client, on_top, in_place=None)
            assert isinstance(digest, str), "who is fenced needs no leave"
            commit = await client.commit(digest, InFlight.RECOMPUTE, deadline_s=DEADLINE_S)
            assert commit.version.number == LAST and commit.tensors_loaded == len(weights)
            assert (await engine._rpc("omni_counters"))["refits_by_plan"] == 2
            ours = await engine._rpc("omni_digests")
            if trainer.courier is not None:
                trainer.courier.close()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
