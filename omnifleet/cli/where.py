"""Which run a command means: --run NAME or folder, else the newest run that is up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnifleet.auth import Scope
from omnifleet.config.recipe import Recipe
from omnifleet.errors import Reason, invalid
from omnifleet.service import ServiceRecord, load_tokens, process_lives, read_records

RunOption = Annotated[
    str, typer.Option("--run", help="Name or folder of the run; default: the newest that is up in ./runs.")
]


CONTROL = "-control"
"""End of the name of a run that another is compared with."""


def find_run(name: str) -> Path:
    """The run's folder. Raises INVALID_REQUEST with what would help."""
    if name:
        for candidate in (Path(name), Path("runs") / name):
            if (candidate / "recipe.yaml").exists():
                return candidate.resolve()
        raise invalid(f"no run {name!r}: neither ./{name} nor ./runs/{name} has a recipe.yaml", knob="--run")
    runs = sorted(Path("runs").glob("*/recipe.yaml"), key=lambda p: p.stat().st_mtime, reverse=True)
    runs.sort(
        key=lambda p: p.parent.name.endswith(CONTROL)
    )  # the demo's is newer than the demo, and nobody means it
    up = [p.parent for p in runs if is_up(p.parent)]
    if up:
        return up[0].resolve()
    if runs:
        return runs[0].parent.resolve()
    raise invalid(
        "no run in ./runs; start one with `omnifleet up RECIPE` or `omnifleet train RECIPE`", knob="--run"
    )


def is_up(run_dir: Path) -> bool:
    """True if a supervisor tends the run."""
    from omnifleet.launch.supervisor import read_state

    pid = int(read_state(run_dir).get("pid", 0))
    return bool(pid) and process_lives(pid)


def service(run_dir: Path, name: str) -> ServiceRecord:
    """The record of a service that is up. Raises UNAVAILABLE-like INVALID_REQUEST with the next step."""
    record = read_records(run_dir).get(name)
    if record is None:
        raise invalid(
            f"{name} of run {run_dir.name} is not up; see `omnifleet status --run {run_dir.name}`",
            reason=Reason.UNAVAILABLE,
        )
    return record


def run_recipe(run_dir: Path) -> Recipe:
    """The resolved recipe that the run was started with."""
    from omnifleet.config.load import read_layers, recipe_from_mapping

    path = run_dir / "recipe.yaml"
    return recipe_from_mapping(read_layers(path), str(path))


def secret(run_dir: Path, scope: Scope) -> str:
    """The run's secret of one scope."""
    recipe = run_recipe(run_dir)
    return load_tokens(run_dir, recipe.auth.tokens_file).secret(scope)
