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
    str,
    typer.Option(
        "--run", help="Name or folder of the run; default: the newest in ./runs that is up, else the newest."
    ),
]


_NAMED = 5
CONTROL = "-control"
"""End of the name of a run that another is compared with."""


def find_run(name: str) -> Path:
    """The run's folder. Raises INVALID_REQUEST with what would help."""
    if name:
        for candidate in (Path(name), Path("runs") / name):
            if (candidate / "recipe.yaml").exists():
                return candidate.resolve()
        raise invalid(
            f"no run {name!r}: neither {name}/recipe.yaml nor {Path('runs') / name}/recipe.yaml is there; {_there()}",
            knob="--run",
        )
    runs = _known()
    up = [run for run in runs if is_up(run)]
    if up or runs:
        return (up or runs)[0].resolve()
    raise invalid(_there(), knob="--run")


def _known() -> list[Path]:
    """Folders of ./runs, the newest first; controls last: the demo's is newer than the demo, and nobody means it."""
    runs = sorted(Path("runs").glob("*/recipe.yaml"), key=lambda p: p.stat().st_mtime, reverse=True)
    return sorted((p.parent for p in runs), key=lambda run: run.name.endswith(CONTROL))


def _there() -> str:
    """The runs of ./runs, and how to come to one."""
    names = [run.name for run in _known()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    there = f"in ./runs are {', '.join(names[:_NAMED])}{more}" if names else "there is none in ./runs"
    return f"{there}; `omnifleet train RECIPE` starts one, `omnifleet config list` names recipes"


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
