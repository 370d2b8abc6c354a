"""`omnifleet config`: look at recipes and check them before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from omnifleet.config import load_recipe
from omnifleet.config.load import dump_recipe, known_recipes
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.placement import place

app = typer.Typer(no_args_is_help=True, help="List, show and check recipes.")

RecipeArgument = Annotated[
    str, typer.Argument(help="Recipe file, or a name that `omnifleet config list` gives.", metavar="RECIPE")
]
OverrideArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Changes, e.g. trainer.steps=20.", metavar="[SECTION.FIELD=VALUE]..."),
]


@app.command()
def show(recipe: RecipeArgument, overrides: OverrideArgument = None) -> None:
    """Print the resolved recipe: inheritance and overrides applied, defaults filled in."""
    text = dump_recipe(load_recipe(recipe, overrides or [], plan=True))
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@app.command()
def placement(
    recipe: RecipeArgument,
    overrides: OverrideArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every process with its GPUs, as JSON.")] = False,
) -> None:
    """Say which process would hold which GPU of the recipe's cluster; starts nothing."""
    placed = place(load_recipe(recipe, overrides or [], plan=True))
    typer.echo(placed.as_json() if as_json else placed.describe())


@app.command("list")
def list_recipes() -> None:
    """List the recipes that a name alone finds, with what each says of itself."""
    for name, path in known_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"{name:32} {first.lstrip('# ') if first.startswith('#') else ''}")


def check_model(recipe: Recipe) -> None:
    """Raises MODEL_MISSING if the recipe's checkpoint is not on this machine."""
    if recipe.model.path != "tiny" and not Path(recipe.model.path).is_dir():
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            f"model.path {recipe.model.path!r} is not a folder on this machine",
            knob="model.path",
        )


@app.command()
def check(recipe: RecipeArgument, overrides: OverrideArgument = None) -> None:
    """Say whether the recipe is right; name every field that is not, with what is allowed."""
    loaded = load_recipe(recipe, overrides or [])
    check_model(loaded)
    samples = loaded.trainer.prompts_per_step * loaded.trainer.generations_per_prompt
    typer.echo(
        f"{recipe} is right: run {loaded.run.name}, {loaded.trainer.steps} steps of "
        f"{loaded.trainer.prompts_per_step} x {loaded.trainer.generations_per_prompt} = {samples} samples, "
        f"{loaded.rollout.workers} rollout worker(s), staleness at most {loaded.trainer.max_staleness}"
    )
