"""What the staleness budget buys: `python bench/trainer/asynchrony.py [--steps 30]`.

The real loop, ledger, credits and buffer; engines and policy only take time. A group occupies one of 16 engine places
for as long as its longest reply takes; a step of 16 groups trains for as long as the engines need for an average one, so
that with perfect overlap both are always busy. Lengths are all alike, or log-normal (sigma 1: one reply in a hundred is
ten times the median).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnifleet.config.recipe import EvaluationConfig
from omnifleet.types import Generation, Identity
from omnifleet_trainer.batch.samples import StepBatch
from tests.unit.loop_world import rows, world

PLACES = GROUPS = 16
SAMPLES = 8
GROUP_S = 0.12
"""Median time of one reply."""


def longest(chance: random.Random, sigma: float) -> float:
    """Seconds until the last reply of a group is there."""
    return max(GROUP_S * chance.lognormvariate(0.0, sigma) for _ in range(SAMPLES))


async def run(budget: int, sigma: float, steps: int) -> dict[str, float]:
    """Steps a minute, and shares of the time in which trainer and engines had nothing to do."""
    chance = random.Random(1)
    train_s = statistics.fmean(longest(random.Random(2 + i), sigma) for i in range(400)) * GROUPS / PLACES
    places, busy = asyncio.Semaphore(PLACES), 0.0

    async def behave(identity: Identity, answer: Generation) -> None:
        nonlocal busy
        async with places:
            seconds = longest(chance, sigma)
            await asyncio.sleep(seconds)
            busy += seconds

    def train(batch: StepBatch) -> dict[str, float]:
        time.sleep(train_s)
        return {"token_mult_prob_error": 1.0, "loss": 0.0}

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "steps": steps,
            "prompts_per_step": GROUPS,
            "generations_per_prompt": SAMPLES,
            "max_staleness": budget,
            "rollout_timeout_s": 300.0,
            "checkpoint_every": steps,
        }
        with world(Path(folder), data=rows(400), evaluation=EvaluationConfig(size=1), **settings) as w:
            w.rollout.behave = behave
            w.policy.train = train  # type: ignore[method-assign]
            began = time.monotonic()
            await w.controller.run()
            spent = time.monotonic() - began
            lag = statistics.fmean(w.journal.values("lag_mean"))
    return {
        "steps_min": 60 * steps / spent,
        "trainer_idle": 1 - steps * train_s / spent,
        "engine_idle": 1 - busy / (PLACES * spent),
        "lag": lag,
    }


def main() -> None:
    """Print one table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=30)
    steps = asked.parse_args().steps
    table = Table(
        "lengths", "budget", "steps a minute", "of synchronous", "trainer idle", "engines idle", "mean lag"
    )
    for name, sigma in (("alike", 0.0), ("log-normal", 1.0)):
        first = 0.0
        for budget in (0, 1, 2, 4):
            found = asyncio.run(run(budget, sigma, steps))
            first = first or found["steps_min"]
            table.add_row(
                name,
                str(budget),
                f"{found['steps_min']:.0f}",
                f"{found['steps_min'] / first:.2f}",
                f"{found['trainer_idle']:.0%}",
                f"{found['engine_idle']:.0%}",
                f"{found['lag']:.2f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
