"""`omnifleet config`: look at recipes and check them before anything starts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from omnifleet.config import load_recipe
from omnifleet.config.load import dump_recipe

app = typer.Typer(no_args_is_help=True, help="Show and check recipes.")

RecipeArgument = Annotated[
    str, typer.Argument(help="Recipe file, or the name of a packaged recipe.", metavar="RECIPE")
]
OverrideArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes, e.g. trainer.steps=20.", metavar="[SECTION.FIELD=VALUE]..."),
]


@app.command()
def show(recipe: RecipeArgument, overrides: OverrideArgument = None) -> None:
    """Print the resolved recipe: inheritance and overrides applied, defaults filled in."""
    text = dump_recipe(load_recipe(recipe, overrides or []))
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@app.command()
def check(recipe: RecipeArgument, overrides: OverrideArgument = None) -> None:
    """Say whether the recipe is right; name every field that is not, with what is allowed."""
    loaded = load_recipe(recipe, overrides or [])
    samples = loaded.trainer.prompts_per_step * loaded.trainer.generations_per_prompt
    typer.echo(
        f"{recipe} is right: run {loaded.run.name}, {loaded.trainer.steps} steps of "
        f"{loaded.trainer.prompts_per_step} x {loaded.trainer.generations_per_prompt} = {samples} samples, "
        f"{loaded.rollout.workers} rollout worker(s), staleness at most {loaded.trainer.max_staleness}"
    )
