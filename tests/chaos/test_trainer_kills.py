"""kill -9 of the real trainer at random moments of a run: AutoModel trains the tiny model, engines are fake."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.load import dump_recipe, recipe_from_mapping
from omnifleet.report.records import read_run
from omnifleet_trainer.ledger import LedgerReader
from tests.integration.test_trainer_process import process, said, services

STEPS, KILLS = 30, 5
PROMPTS, SAMPLES = 4, 2
pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]


def write_recipe(folder: Path, model: Path) -> Path:
    run_dir = folder / "run"
    run_dir.mkdir()
    body = {
        "run": {"name": "run", "root": str(folder)},
        "model": {"path": str(model), "freeze": ["visual.*"]},
        "reward": [{"name": "format"}],
        "sampling": {"max_tokens": 12},
        "data": {"max_prompt_tokens": 160, "train": {"size": 64}},
        "evaluation": {"size": 4},
        "trainer": {
            "backend": "automodel", "threads": 1, "steps": STEPS, "prompts_per_step": PROMPTS,
            "generations_per_prompt": SAMPLES, "checkpoint_every": 1, "rollout_timeout_s": 60, "step_timeout_s": 120,
            "optimizer": {"lr": 1e-6},
        },
        "media": {"store": str(folder / "store")},
    }  # fmt: skip
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe_from_mapping(body, "test")))
    return run_dir


def trainer(run_dir: Path) -> Any:
    code = "from omnifleet_trainer.cli import app; app()"
    return process(run_dir, "trainer", "-c", code, "serve", "--run-dir", str(run_dir))


def step_of(run_dir: Path) -> int:
    rows = read_run(run_dir).steps if (run_dir / "metrics.jsonl").exists() else []
    return int(rows[-1]["step"]) if rows else -1


async def test_CKP_01_five_kills_of_the_real_trainer_lose_and_repeat_nothing(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    run_dir = write_recipe(tmp_path, random_checkpoint)
    chance = random.Random(time.time_ns())
    async with services(run_dir):
        for kill in range(KILLS):
            goal = step_of(run_dir) + 1
            async with trainer(run_dir) as child:
                async with asyncio.timeout(120):
                    while step_of(run_dir) < goal:
                        assert child.returncode is None, said(run_dir)
                        await asyncio.sleep(0.02)
                await asyncio.sleep(chance.uniform(0.0, 0.8))  # anywhere: in a step, a checkpoint, a refit
                assert child.returncode is None, f"done before kill {kill}"
                child.kill()
                await child.wait()
            (run_dir / "services" / "trainer.json").unlink()
        async with trainer(run_dir) as child:
            assert await asyncio.wait_for(child.wait(), 240) == 0, said(run_dir)

    counts = LedgerReader(run_dir / "ledger.sqlite").counts()
    assert (counts.consumed, counts.consumed_twice, counts.lost) == (STEPS * PROMPTS * SAMPLES, 0, 0)
    assert (counts.in_flight, counts.given_up, counts.steps) == (0, 0, STEPS)
    steps = [row["step"] for row in read_run(run_dir).steps]
    assert steps == list(range(STEPS + 1)), "no step is skipped, none is there twice"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
