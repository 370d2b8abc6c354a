"""`omnifleet report`: curves, ledger and sample rollouts of a run as HTML and PNG, while it trains or afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from omnifleet.auth import Scope
from omnifleet.cli.counted import keep_counters
from omnifleet.cli.where import RunOption, find_run, is_up, run_recipe, secret
from omnifleet.config.recipe import Recipe
from omnifleet.errors import Reason, invalid
from omnifleet.report.lives import Life, read_lives
from omnifleet.report.records import RunRecords, read_run
from omnifleet.service import read_records
from omnifleet.telemetry.words import duration

if TYPE_CHECKING:
    from omnifleet.report.facts import Check

_LEDGER_S = 60.0


@dataclass(frozen=True, slots=True)
class Written:
    """Files of a report."""

    page: Path
    curves: Path


def add_to(app: typer.Typer) -> None:
    """Add the command to the root app."""
    app.command()(report)


def report(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="The same as --run, which other commands take.")
    ] = "",
    run: RunOption = "",
) -> None:
    """Write a run's report.html and curves.png: curves, ledger, sample rollouts, counters; while it trains, or later.

    Pictures of rollouts come from the run's media service, and are kept beside the report for when it is down.
    """
    if name and run and name != run:
        raise invalid(f"one run is reported, not both {name!r} and {run!r}", knob="--run")
    run_dir = find_run(name or run)
    written = write_report(run_dir, run_recipe(run_dir))
    console = Console()
    console.print(f"report: {written.page}", soft_wrap=True, highlight=False)
    console.print(f"curves: {written.curves}", soft_wrap=True, highlight=False)


def write_report(
    run_dir: Path,
    recipe: Recipe,
    *,
    subtitle: str = "",
    checks: Sequence[Check] | None = None,
    lives: Sequence[Life] | None = None,
) -> Written:
    """Write curves.png and report.html into the run's folder.

    checks: what the run claims of itself; by default what must hold of every run. lives: what its processes counted; by
    default what they say now, or said when they were last asked. Raises INVALID_REQUEST if the run has recorded
    nothing yet.
    """
    from omnifleet.report.curves import draw_curves  # draws: not for every command to load
    from omnifleet.report.facts import run_checks
    from omnifleet.report.page import sample_digests, write_page
    from omnifleet.report.pictures import fetch_pictures

    run = read_run(run_dir)
    if not run.steps:
        raise invalid(
            f"run {run.name} has recorded no step yet: there is nothing to report",
            reason=Reason.INVALID_REQUEST,
        )
    ledger = ledger_counts(run_dir, run)
    if lives is None:
        lives = keep_counters(run_dir) if is_up(run_dir) else read_lives(run_dir)
    media = read_records(run_dir).get("media") if is_up(run_dir) else None
    pictures = fetch_pictures(
        run_dir / "report",
        sample_digests(run.samples),
        http=media.http if media else "",
        secret=secret(run_dir, Scope.OPERATOR),
    )
    curves = draw_curves(run, run_dir / "curves.png")
    page = write_page(
        run,
        run_dir / "report.html",
        curves=curves,
        subtitle=subtitle or _subtitle(run, recipe),
        checks=run_checks(run, ledger) if checks is None else checks,
        ledger=ledger,
        pictures=pictures,
        lives=lives,
    )
    return Written(page, curves)


def ledger_counts(run_dir: Path, run: RunRecords) -> dict[str, Any]:
    """The run's account: as its summary has it, else from `omnifleet ledger query`; {} if there is no ledger here."""
    last = int(run.steps[-1]["step"]) if run.steps else 0
    if int(run.summary.get("steps", -1)) == last:
        return dict(run.summary["ledger"])
    if not (run_dir / "ledger.sqlite").exists():
        return {}
    asked = [sys.executable, "-m", "omnifleet", "ledger", "query", "--run", str(run_dir)]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_LEDGER_S, check=False).stdout
        counts = json.loads(said)
    except (subprocess.TimeoutExpired, ValueError):
        return {}  # the trainer's distribution is not installed here: the page goes without
    return {name: value for name, value in counts.items() if isinstance(value, int)}


def _subtitle(run: RunRecords, recipe: Recipe) -> str:
    last = int(run.steps[-1]["step"])
    began, ended = (run.steps[place].get("unix_ms", 0) / 1000 for place in (0, -1))
    return (
        f"step {last} of {recipe.trainer.steps}, {duration(max(0.0, ended - began))} from the first record to the last; "
        f"{recipe.model.path}, {recipe.trainer.backend}, {recipe.trainer.prompts_per_step} prompts x "
        f"{recipe.trainer.generations_per_prompt} replies a step, {recipe.rollout.workers} rollout workers"
    )
