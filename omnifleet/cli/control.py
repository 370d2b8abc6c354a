"""The control of the demo: a second, short run on the same services whose learning rate is 0."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from omnifleet.config.load import recipe_from_mapping
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.plan import prepare_run
from omnifleet.launch.supervisor import last_line
from omnifleet.report.records import read_mapping
from omnifleet.service import read_records

STEPS = 4
_DEADLINE_S = 300.0


def control_dir(run_dir: Path) -> Path:
    """Where the control of a run is."""
    return run_dir.with_name(f"{run_dir.name}-control")


def run_control(run_dir: Path, recipe: Recipe, console: Console) -> None:
    """Train STEPS steps with learning rate 0 against the run's own services. Raises INTERNAL if the trainer fails."""
    body = recipe.model_dump(mode="json")
    body["run"]["name"] = control_dir(run_dir).name
    body["trainer"]["steps"] = STEPS
    body["trainer"]["optimizer"]["lr"] = 0.0
    body["evaluation"]["controls"] = False
    control = recipe_from_mapping(body, "control")
    if control.run_dir.exists():
        shutil.rmtree(control.run_dir)
    control.run_dir.mkdir(parents=True)
    shutil.copy(run_dir / "tokens.json", control.run_dir / "tokens.json")
    folder = prepare_run(control)
    records = read_records(run_dir)
    command = [sys.executable, "-m", "omnifleet", "trainer", "serve", "--run-dir", str(folder)]
    for name in ("media", "gateway", "reward"):
        command += [f"--{name}", records[name].grpc]
    log = folder / "logs" / "trainer.log"
    with console.status("control: learning rate 0"), log.open("ab") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=out, timeout=_DEADLINE_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code != 0:
        raise OmnifleetError(
            Reason.INTERNAL, f"the control ended with status {code}: {last_line(log)}", knob=str(log)
        )
    summary = read_mapping(folder / "summary.json")
    console.print(
        f"      control: held-out reward {summary['heldout_start']:.3f} -> {summary['heldout_end']:.3f} "
        f"after {STEPS} steps with learning rate 0"
    )
