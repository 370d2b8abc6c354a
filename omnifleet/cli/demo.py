"""`omnifleet demo`: the whole story on this machine's CPU, with a report at the end."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from omnifleet.cli.counted import keep_counters
from omnifleet.cli.run import resolve_model, start_services, stop_services
from omnifleet.cli.watch import watch_training
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.supervisor import want
from omnifleet.report.records import read_mapping

if TYPE_CHECKING:
    from omnifleet.cli.demo_report import DemoReport

RECIPE = "cpu-tiny"
CLAIM_EXIT = 1
"""Exit status where the demo ran to its end, but a claim of its report does not hold."""
console = Console()


def add_to(app: typer.Typer) -> None:
    """Add the command to the root app."""
    app.command()(demo)


def demo(
    seed: Annotated[int, typer.Option(help="Seed of model, scenes and sampling.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: the recipe's.")] = None,
    control: Annotated[bool, typer.Option(help="Also run the learning-rate-0 control.")] = True,
    runs: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
) -> None:
    """Train a tiny vision-language model with asynchronous GRPO through the four services, and show the reward rise.

    Makes and warm-starts a 3 MB model, which takes two to three minutes of CPU time, once.
    Then it starts media, reward, gateway and two rollout workers, and trains.
    At the end it runs a control whose weights never move, and writes a report with curves and samples.

    Its claims are printed with the numbers that show them; if one does not hold, the exit status is 1. Much fewer steps than
    the recipe's are too few for some of them.
    """
    began = time.monotonic()
    overrides = [f"run.name=demo-{seed}", f"run.root={runs}", f"run.seed={seed}"]
    overrides += [f"trainer.steps={steps}"] if steps else []
    _say("1/5", "the tiny model (made and warm-started once, then cached)")
    asked = time.time()
    recipe = resolve_model(RECIPE, overrides)
    _say_warm_start(Path(recipe.model.path), since=asked)
    _start_afresh(recipe.run_dir)
    _say("2/5", f"services: media, reward, gateway, {recipe.rollout.workers} rollout workers (vLLM on CPU)")
    run_dir = start_services(recipe)
    try:
        _say(
            "3/5",
            f"training: {recipe.trainer.steps} steps; beside it, in a second terminal, try {_activated()}`omnifleet status`, "
            "`omnifleet fleet scale 3`",
        )
        _train(run_dir, recipe)
        keep_counters(run_dir)  # before the control, whose first refit begins a new encoder epoch
        if control:
            _say("4/5", "control: a few steps with learning rate 0, where nothing may move")
            _control(run_dir, recipe)
        _say("5/5", "report")
        report = _report(run_dir, recipe, began)
    finally:
        stop_services(run_dir)
    console.print(report.text, soft_wrap=True)
    if report.failing:
        raise typer.Exit(CLAIM_EXIT)


def _activated() -> str:
    """What makes the command known to a shell that does not find it."""
    return "" if shutil.which("omnifleet") else f"`source {sys.prefix}/bin/activate`, "


def _say(number: str, what: str) -> None:
    console.print(f"[bold]\\[{number}][/bold] {what}", soft_wrap=True)


def _say_warm_start(model: Path, *, since: float) -> None:
    """Of a cached model: one that was made just now has told it itself."""
    told = model / "warmstart.json"
    warm = read_mapping(told)
    if warm and told.stat().st_mtime < since:
        steps = sum(int(warm.get(f"{lesson}_steps", 0)) for lesson in ("see", "answer", "careless"))
        console.print(
            f"      cached; its warm start: {steps} supervised steps in {warm['seconds']:.0f} s, "
            f"held-out reward {warm['greedy']:.2f} greedy, {warm['sampled']:.2f} sampled"
        )


def _start_afresh(run_dir: Path) -> None:
    """A demo begins at step 0: an older demo of this name is put away."""
    stop_services(run_dir)
    if run_dir.exists():
        shutil.rmtree(run_dir)


def _train(run_dir: Path, recipe: Recipe) -> None:
    want(run_dir, train=True)
    finished = watch_training(run_dir, recipe, console, title="training")
    want(run_dir, train=False)
    if not finished:
        raise OmnifleetError(
            Reason.INTERNAL, "the trainer failed; its log says why", knob=f"{run_dir}/logs/trainer.log"
        )


def _control(run_dir: Path, recipe: Recipe) -> None:
    """A second run on the same services: same start, same prompts, learning rate 0."""
    from omnifleet.cli.control import run_control

    run_control(run_dir, recipe, console)


def _report(run_dir: Path, recipe: Recipe, began: float) -> DemoReport:
    from omnifleet.cli.demo_report import write_demo_report

    return write_demo_report(run_dir, recipe, time.monotonic() - began)
