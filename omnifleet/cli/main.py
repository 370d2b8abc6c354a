"""`omnifleet`: the root command, and the commands that installed services bring."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

import omnifleet
from omnifleet.cli import config, demo, fleet, report, run
from omnifleet.errors import OmnifleetError, Reason, room_for

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="""Asynchronous GRPO post-training of vision-language models, as services.

[bold]First time:[/bold] `omnifleet demo` trains a tiny model on this machine's CPU and shows the reward rise.

[bold]A run:[/bold] `omnifleet train RECIPE` starts what is not up, trains, and can be stopped and resumed at any time.
Recipes: `omnifleet config list`; what one says: `omnifleet config show RECIPE`.
Beside a run: `omnifleet status`, `omnifleet fleet list|scale|drain`, `omnifleet logs`, `omnifleet report`,
`omnifleet ledger query`.

[bold]One service alone:[/bold] `omnifleet media|reward|gateway|rollout|trainer serve --help`.""",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"omnifleet {omnifleet.__version__} (contract {omnifleet.CONTRACT})")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and stop.")
    ] = False,
) -> None:
    """Root options."""


run.add_to(app)
report.add_to(app)
demo.add_to(app)
app.add_typer(fleet.app, name="fleet")
app.add_typer(config.app, name="config")


@cache
def whole_app() -> typer.Typer:
    """The command with everything that installed services bring."""
    for point in sorted(entry_points(group="omnifleet.services"), key=lambda p: p.name):
        app.add_typer(_load(point), name=point.name, rich_help_panel="Single services")
    for point in sorted(entry_points(group="omnifleet.commands"), key=lambda p: p.name):
        brought = _load(point)
        if isinstance(brought, typer.Typer):
            app.add_typer(brought, name=point.name, rich_help_panel="More")
        else:
            app.command(point.name, rich_help_panel="More")(brought)
    return app


def _load(point: EntryPoint) -> Any:
    """What an installed service brings; one that cannot be imported says so when it is called, and only then."""
    try:
        return point.load()
    except ImportError as error:
        return _broken(point, error)


def _broken(point: EntryPoint, error: ImportError) -> Any:
    message = f"`omnifleet {point.name}` cannot be used: {error}"

    def refuse() -> None:
        raise OmnifleetError(Reason.UNSUPPORTED, message, knob=f"install of {point.value.partition('.')[0]}")

    if point.group == "omnifleet.commands":
        return refuse
    broken = typer.Typer(help=f"Not usable here: {error}", invoke_without_command=True)
    broken.callback()(refuse)
    return broken


def main() -> None:
    """Entry point: typed errors end with one clear line and status 2."""
    try:
        with room_for("run.root"):
            whole_app()()
    except OmnifleetError as error:
        print(f"omnifleet: {error}", file=sys.stderr)
        raise SystemExit(2) from None
