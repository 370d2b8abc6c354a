"""The demo over three seeds: held-out reward before and after, time, TMPE. Writes omnifleet/report/demo_seeds.json.

Run: python bench/demo_seeds.py [SEED ...]
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omnifleet.cli.demo import CLAIM_EXIT

OUT = Path(__file__).resolve().parent.parent / "omnifleet" / "report" / "demo_seeds.json"


def run_demo(seed: int, runs: Path) -> dict[str, Any]:
    """One demo; its summary with the wall time in seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "omnifleet", "demo", "--seed", str(seed), "--runs", str(runs)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, CLAIM_EXIT):
        done.check_returncode()
    summary = json.loads((runs / f"demo-{seed}" / "summary.json").read_text())
    return {"seed": seed, "wall_s": time.monotonic() - began, **summary}


def main() -> None:
    seeds = [int(arg) for arg in sys.argv[1:]] or [0, 1, 2]
    with tempfile.TemporaryDirectory() as folder:
        rows = [run_demo(seed, Path(folder)) for seed in seeds]
    print(f"{'seed':>4} {'start':>6} {'end':>6} {'blank':>6} {'shuffled':>8} {'TMPE max':>8} {'wall s':>7}")
    for row in rows:
        controls = row["controls"]
        print(
            f"{row['seed']:>4} {row['heldout_start']:>6.3f} {row['heldout_end']:>6.3f} {controls['blank']:>6.3f} "
            f"{controls['shuffled']:>8.3f} {row['tmpe_max']:>8.4f} {row['wall_s']:>7.0f}"
        )
    median = {
        "date": datetime.date.today().isoformat(),
        "seeds": seeds,
        "start": statistics.median(row["heldout_start"] for row in rows),
        "end": statistics.median(row["heldout_end"] for row in rows),
        "wall_s": statistics.median(row["wall_s"] for row in rows),
    }
    print(f"median {median['start']:.3f} -> {median['end']:.3f} in {median['wall_s']:.0f} s")
    OUT.write_text(json.dumps(median, indent=1) + "\n")


if __name__ == "__main__":
    main()
