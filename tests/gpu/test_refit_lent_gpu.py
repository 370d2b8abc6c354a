"""Transport `cuda_ipc` between processes: two ranks of a light engine cut their slices out of what the sender lends.

One GPU: all three processes on it. Two: a rank on each, which sees its own alone, or both. No vLLM, no NCCL: seconds.
Run: python -m pytest tests/gpu/test_refit_lent_gpu.py -m gpu
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet_trainer.refit.lender import lend
from tests import refit_model
from tests.chaos.test_refit_faults import spawner
from tests.refit_fleet import broadcasting
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_ranks import ranks_engine
from tests.refit_world import served

__all__ = ["spawner"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SENDER = torch.device("cuda", 0)
HIDDEN = 1024
MATRIX = 4 * HIDDEN * HIDDEN
SLICES = 3 * MATRIX // 2 + 2 * MATRIX + 4 * HIDDEN
"""Bytes of what one rank of two reads of a step: halves of q, k and v, two experts, the norm."""
PLACES = [
    pytest.param(("cuda:0", "cuda:0"), True, id="one"),
    pytest.param(("cuda:0", "cuda:1"), True, id="two-that-see-their-own"),
    pytest.param(("cuda:0", "cuda:1"), False, id="two-that-see-both"),
]


@pytest.mark.parametrize(("devices", "blind"), PLACES)
async def test_ranks_cut_their_slices_out_of_what_is_lent_and_hold_what_fresh_ranks_load(
    spawner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], blind: bool
) -> None:
    if torch.cuda.device_count() < len(set(devices)):
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(refit_model, "HIDDEN", HIDDEN)
    checkpoint = write_checkpoint(tmp_path / "c")
    settings: dict[str, Any] = {"device": SENDER, "transport": "cuda_ipc", "device_bucket_bytes": 3 * MATRIX}
    async with (
        ranks_engine(spawner, checkpoint, devices, blind=blind) as engine,
        served(engine, "w0") as worker,
        broadcasting([worker], **settings) as sender,
    ):
        taken = 0.0
        for step in range(4):
            sent = {name: tensor.to(SENDER) for name, tensor in tensors(step).items()}
            report = await sender.publish(step, iter(sent.items()), MOVES, encoder_changed=False)
            assert report.ok == ("w0",), report.failed
            assert await engine.holds(step)
            _, manifest = worker.receiver.serves()
            assert manifest is not None and bool(manifest.parts) == (step > 0), "the first is the loader's"
            before, taken = taken, worker.counters.count("refit_bytes")
            assert step == 0 or taken - before == SLICES
        assert engine.by_plan == [False, True, True, True]
        await engine.ask("limit", 0)  # and once more without a shadow, whole, straight into place
        sent = {name: tensor.to(SENDER) for name, tensor in tensors(4).items()}
        report = await sender.publish(4, iter(sent.items()), MOVES, encoder_changed=False)
        assert report.ok == ("w0",) and await engine.holds(4), report.failed
        assert worker.counters.count("refits_in_place") == 1


async def test_what_was_lent_is_freed_whoever_read_it(spawner: Any, tmp_path: Path) -> None:
    """torch keeps for ever what is freed while its count of readers is not nought; a refused stage has none, two ranks are two."""
    size = 64 << 20
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        ranks_engine(spawner, checkpoint, ["cuda:0"]) as one,
        ranks_engine(spawner, checkpoint, ["cuda:0", "cuda:0"]) as two,
    ):
        spare = torch.ones(1, dtype=torch.uint8, device=SENDER)
        lend([spare])  # what lending keeps for good is there from here on
        gc.collect()  # what other tests left
        before = torch.cuda.memory_allocated(SENDER)
        for readers in ([], [one], [two], [one, two]):
            bucket = torch.ones(size, dtype=torch.uint8, device=SENDER)
            (handles,) = lend([bucket]).handles.values()
            for engine in readers:
                assert set(await engine.ask("read", handles)) == {size}
            del bucket
            gc.collect()
            assert torch.cuda.memory_allocated(SENDER) == before, f"{len(readers)} engines read it"
