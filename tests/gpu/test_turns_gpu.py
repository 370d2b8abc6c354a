"""Trainer and engine in turns on one GPU: what the engine gives up, what it gets back, and a whole run.

Run: python -m pytest tests/gpu/test_turns_gpu.py -m gpu -s    (one GPU; about five minutes, two engine starts)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.errors import OmnifleetError, Reason
from tests.integration.live_worker import Live, random_weights, start_live, transfer_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "h200-tiny.yaml"
HALF = 0.05
KV_BYTES = 4 << 30


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    live = start_live(
        tmp_path_factory.mktemp("turns"),
        tied=False,
        scale=0.5,
        patience_s=500,
        sleep_level=2,
        dtype="float16",
        kv_cache_memory_bytes=KV_BYTES,
        block_size=16,
        gpu_memory_utilization=0.3,
        threads=4,
    )
    yield live
    live.close()


def free_bytes() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


async def scored(on: Any) -> list[float]:
    logprobs, _ = await on.rollout.score_tokens(on.prompt(), [50, 51, 52])
    return logprobs


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_gives_its_memory_up_and_wakes_as_it_was(live: Live, level: int) -> None:
    with transfer_file() as shm:
        async with live.clients() as on:
            weights = random_weights(live.weights, 5 + level, 0.5)
            await on.refit_to(weights, shm)
            before, awake = await scored(on), free_bytes()
            await on.turns.sleep(level, deadline_s=120)
            asleep = free_bytes()
            print(
                f"level {level}: {(asleep - awake) / 2**30:.2f} GiB given up of {KV_BYTES / 2**30:.0f} GiB of KV"
            )
            assert asleep - awake > 0.9 * KV_BYTES
            await on.turns.wake(weights_only=True, deadline_s=120)
            assert free_bytes() - awake > 0.8 * KV_BYTES, "the KV cache is still away"
            if level == 2:
                with pytest.raises(OmnifleetError) as fenced:
                    await scored(on)
                assert fenced.value.reason is Reason.FENCED
                await on.refit_to(weights, shm)
            await on.turns.wake(deadline_s=120)
            assert np.abs(np.array(before) - np.array(await scored(on))).max() < HALF
            await on.refit_to(random_weights(live.weights, 8 + level, 0.5), shm)  # by the plan, after a sleep
            assert np.abs(np.array(before) - np.array(await scored(on))).max() > HALF


@pytest.mark.parametrize("budget", [0, 1])
def test_a_run_in_turns(random_checkpoint: Path, tmp_path: Path, budget: int) -> None:
    command = [sys.executable, "-m", "omnifleet", "train", str(RECIPE), f"model.path={random_checkpoint}"]
    command += [f"run.root={tmp_path}", "trainer.steps=4", "evaluation.controls=false", "evaluation.size=16"]
    command += ["rollout.sleep_level=1", "refit.transport=cuda_ipc", f"trainer.max_staleness={budget}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "h200-tiny"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["refits"]) == (4, 5)
    assert summary["ledger"]["consumed_twice"] == 0 and summary["tmpe_max"] < 1.05
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    turned = [row for row in rows if "turn/sleep_s" in row]
    assert len(turned) == 4 and max(row["lag_max"] for row in turned) <= budget
    for name in ("sleep", "onload", "offload", "wake_weights", "wake"):
        print(f"turn/{name}_s", [round(row[f"turn/{name}_s"], 3) for row in turned])
