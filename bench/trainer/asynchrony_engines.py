"""What the staleness budget buys on the CPU recipe, with real engines: `python bench/trainer/asynchrony_engines.py [--steps 25]`.

Each row is a run of `cpu-tiny` of its own, services started afresh: two vLLM engines and the trainer share the machine's
cores. The first steps, in which engines and kernels warm up, are left out. `at once`: groups generated at one time; `all` is
what a synchronous run would choose, the recipe's own 2 spread generation over the whole step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

WARM_UP = 5
ROWS = ((None, 0), (None, 1), (None, 2), (None, 4), (2, 1))
"""Groups at one time, budget."""
QUIET = (
    "gateway.queue_per_run=2048",
    "evaluation.every=1000",
    "evaluation.size=1",
    "evaluation.controls=false",
    "trainer.checkpoint_every=1000",
)


def train(budget: int, at_once: int | None, steps: int, runs: Path) -> list[dict[str, float]]:
    """The records of one run's steps."""
    name = f"budget-{budget}-{at_once or 'all'}"
    settings = (
        f"run.name={name}",
        f"run.root={runs}",
        f"trainer.steps={steps}",
        f"trainer.max_staleness={budget}",
        f"trainer.groups_at_once={'null' if at_once is None else at_once}",
        *QUIET,
    )
    command = [sys.executable, "-m", "omnifleet", "train", "cpu-tiny", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=1800)
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def summary(records: list[dict[str, float]]) -> dict[str, float]:
    """Rates and shares over all steps after the warm-up, weighted by their time."""
    steps = [record for record in records if record["step"] > WARM_UP]
    seconds = sum(step["step_s"] for step in steps)

    def share(name: str) -> float:
        seen = [step for step in steps if name in step]
        return sum(step[name] * step["step_s"] for step in seen) / sum(step["step_s"] for step in seen)

    return {
        "tokens_s": sum(step["response_tokens"] for step in steps) / seconds,
        "steps_min": 60 * len(steps) / seconds,
        "trainer_idle": share("idle_share"),
        "engine_idle": share("engine_idle_share"),
        "lag": share("lag_mean"),
        "tmpe": max(step["tmpe"] for step in steps),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=25)
    steps = options.parse_args().steps
    table = Table(
        "at once",
        "budget",
        "tokens/s",
        "of synchronous",
        "steps a minute",
        "trainer idle",
        "engines idle",
        "lag",
        "TMPE",
    )
    console = Console()
    with tempfile.TemporaryDirectory() as folder, console.status("training") as status:
        synchronous = 0.0
        for at_once, budget in ROWS:
            status.update(f"at once {at_once or 'all'}, budget {budget}")
            row = summary(train(budget, at_once, steps, Path(folder)))
            synchronous = synchronous or row["tokens_s"]
            cells = (
                str(at_once or "all"),
                str(budget),
                f"{row['tokens_s']:.0f}",
                f"{row['tokens_s'] / synchronous:.2f}",
                f"{row['steps_min']:.1f}",
                f"{row['trainer_idle']:.0%}",
                f"{row['engine_idle']:.0%}",
                f"{row['lag']:.2f}",
                f"{row['tmpe']:.4f}",
            )
            table.add_row(*cells)
            console.print(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
