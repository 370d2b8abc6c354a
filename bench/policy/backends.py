"""The demo's recipe on both backends: do they reach the same reward? `python bench/policy/backends.py [--seeds 0 1 2 3 4]`.

One warm-started tiny Qwen2.5-VL (Megatron Bridge has no Qwen2-VL) is trained with `cpu-tiny` by each backend and seed, and
by two ranks of each with the first seed. A seed picks the order of questions and what is sampled. Held-out reward of
`--heldout` questions after the last step; the interval is Welch's for the difference of the means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpmath import betainc, findroot
from rich.console import Console
from rich.table import Table

BACKENDS = ("automodel", "megatron")
console = Console()


def tiny_model() -> Path:
    """The folder of the warm-started model, made now if need be."""
    command = [sys.executable, "-m", "omnifleet", "tiny-model", "--family", "qwen2_5_vl"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    return Path(made.stdout.strip().splitlines()[-1])


def train(model: Path, backend: str, seed: int, ranks: int, heldout: int, runs: Path) -> dict[str, float]:
    """Held-out reward before and after, largest TMPE, and seconds, of one run."""
    name = f"{backend}-{seed}-{ranks}"
    settings = (
        f"run.name={name}",
        f"run.root={runs}",
        f"run.seed={seed}",
        f"model.path={model}",
        f"trainer.backend={backend}",
        f"trainer.parallel.dp={ranks}",
        "trainer.checkpoint_every=1000",
        "evaluation.every=1000",
        "evaluation.controls=false",
        f"evaluation.size={heldout}",
    )
    command = [sys.executable, "-m", "omnifleet", "train", "cpu-tiny", *settings]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=3600)
    summary = json.loads((runs / name / "summary.json").read_text())
    return {
        "start": summary["heldout_start"],
        "end": summary["heldout_end"],
        "tmpe": summary["tmpe_max"],
        "seconds": time.monotonic() - began,
    }


def half_width(a: list[float], b: list[float]) -> float:
    """Half the 95 % interval of the difference of two means, by Welch's t (B. L. Welch, Biometrika 34, 1947)."""
    of_a, of_b = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))

    def beyond(t: float) -> float:
        return betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) - 0.05

    return float(findroot(beyond, (1.5, 20), solver="anderson")) * (of_a + of_b) ** 0.5


def tell_difference(ends: dict[str, list[float]]) -> None:
    """Mean and spread of each backend, and the 95 % interval of the difference of the means."""
    for backend, values in ends.items():
        spread = statistics.stdev(values)
        console.print(f"{backend}: mean {statistics.fmean(values):.4f}, standard deviation {spread:.4f}")
    middle = statistics.fmean(ends["automodel"]) - statistics.fmean(ends["megatron"])
    half = half_width(ends["automodel"], ends["megatron"])
    holds = "holds" if abs(middle) <= half else "does not hold"
    console.print(f"automodel - megatron: {middle:+.4f} ± {half:.4f} (95 %; {holds} 0, {2 * half:.4f} wide)")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options.add_argument("--heldout", type=int, default=512)
    asked = options.parse_args()
    table = Table("backend", "ranks", "seed", "start", "end", "TMPE", "seconds")
    ends: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    rows = [(backend, seed, 1) for seed in asked.seeds for backend in BACKENDS]
    rows += [(backend, asked.seeds[0], 2) for backend in BACKENDS]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model()
        for backend, seed, ranks in rows:
            got = train(model, backend, seed, ranks, asked.heldout, Path(folder))
            if ranks == 1:
                ends[backend].append(got["end"])
            cells = (
                f"{got['start']:.3f}",
                f"{got['end']:.3f}",
                f"{got['tmpe']:.4f}",
                f"{got['seconds']:.0f}",
            )
            table.add_row(backend, str(ranks), str(seed), *cells)
            console.print(backend, ranks, seed, *cells)
    console.print(table)
    if len(asked.seeds) > 1:
        tell_difference(ends)


if __name__ == "__main__":
    main()
