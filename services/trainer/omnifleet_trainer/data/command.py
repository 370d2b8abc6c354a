"""`omnifleet data`: fetch sets, check every row before a run, look at them, and prepare rows with clips."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from omnifleet.cli.config import OverrideArgument, RecipeArgument
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason, invalid

if TYPE_CHECKING:
    from omnifleet.config.recipe import Recipe, SplitConfig
    from omnifleet_trainer.data import PromptRow
    from omnifleet_trainer.data.checking import Fault

app = typer.Typer(no_args_is_help=True, help="Sets of prompts: fetch, check, look at, prepare.")
videos = typer.Typer(no_args_is_help=True, help="Rows of NeMo Gym's video GRPO.")
app.add_typer(videos, name="prepare-video")

_SHOWN = 20
Which = Annotated[str, typer.Option("--set", help="train or heldout.")]
Roots = Annotated[
    list[Path] | None,
    typer.Option("--root", help="Folder that media must lie below. Repeatable; default: anywhere."),
]
Several = Annotated[bool, typer.Option("--several", help="Allow more than the reference's one clip a row.")]


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="Set: avqa, clevr-cogent, geometry3k, mmpr-tiny, refcoco.")],
    to: Annotated[Path, typer.Option("--to", help="Folder; the recipe's data.train.path.")],
    revision: Annotated[str, typer.Option(help="Commit, tag or branch on the Hugging Face hub.")] = "main",
    split: Annotated[str, typer.Option(help="Of clevr-cogent, whose splits are repositories.")] = "train",
) -> None:
    """Download a set. Goes on where it broke off; a folder that is complete is left alone."""
    from omnifleet_trainer.data.hub import fetch

    commit = fetch(name, split, to, revision)
    typer.echo(f"{name} at {commit} is in {to}; pin it: data.train.revision={commit}")


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: OverrideArgument = None,
    which: Which = "train",
    rows: Annotated[int, typer.Option(min=0, help="Rows to check of each set; 0 = all.")] = 0,
    score: Annotated[bool, typer.Option("--score/--no-score", help="Ask the scorers, too.")] = True,
) -> None:
    """Load, decode and measure every row, and have the reward judge its own answer. Status 1 if a row is unfit."""
    loaded = load_recipe(recipe, overrides or [])
    unfit = 0
    for split, found in _sets(loaded, which):
        chosen = found[:rows] if rows else found
        faults = asyncio.run(_faults(loaded, split, chosen, score=score))
        unfit += len(faults)
        for fault in faults[:_SHOWN]:
            typer.echo(f"row {fault.number} {fault.prompt_id}: {fault.error}")
        typer.echo(f"{split.dataset} / {split.split}: {len(chosen)} rows, {len(faults)} unfit")
    if unfit:
        raise typer.Exit(1)


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: OverrideArgument = None,
    out: Annotated[Path, typer.Option("--out", help="File that ends in .html or .png.")] = Path("rows.html"),
    which: Which = "train",
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows of each set.")] = 20,
) -> None:
    """Write a contact sheet: pictures, questions and answers as training sees them."""
    from omnifleet_trainer.data.sheet import html_sheet, png_sheet

    loaded = load_recipe(recipe, overrides or [])
    chosen = [row for _, found in _sets(loaded, which) for row in found[:rows]]
    match out.suffix:
        case ".html":
            out.write_text(html_sheet(chosen, f"{loaded.run.name}: {which}"), encoding="utf-8")
        case ".png":
            out.write_bytes(png_sheet(chosen))
        case _:
            raise invalid(f"{out} ends neither in .html nor in .png", knob="--out")
    typer.echo(f"{len(chosen)} rows are in {out}")


def _sets(recipe: Recipe, which: str) -> Iterator[tuple[SplitConfig, Sequence[PromptRow]]]:
    from omnifleet_trainer.data import load_split

    sets = {"train": recipe.data.train_sets, "heldout": recipe.data.heldout_sets}
    if which not in sets:
        raise invalid(f"--set {which}: allowed are train, heldout", knob="--set")
    size = recipe.evaluation.size if which == "heldout" else None
    for split in sets[which]:
        yield split, load_split(split, seed=recipe.run.seed, size=size)


async def _faults(
    recipe: Recipe, split: SplitConfig, rows: Sequence[PromptRow], *, score: bool
) -> list[Fault]:
    from omnifleet_trainer.data.checking import checked, prompt_measure, scorers_of, unscorable

    model = Path(recipe.model.path)
    measure = await asyncio.to_thread(prompt_measure, model, trust_remote_code=recipe.model.trust_remote_code)
    if measure is None:
        typer.echo(
            f"prompts are not measured: {model} is no folder, or of a family without a rule here", err=True
        )
    fit: list[tuple[int, PromptRow]] = []
    faults: list[Fault] = []
    for number, (row, fault) in enumerate(
        checked(rows, limit=recipe.data.max_prompt_tokens, measure=measure)
    ):
        if fault is not None:
            faults.append(fault)
        elif row is not None:
            fit.append((number, row))
    if score:
        faults += await unscorable(fit, scorers_of(recipe, split), recipe)
    return sorted(faults, key=lambda fault: fault.number)


@videos.command("convert")
def convert_videos(
    source: Annotated[Path, typer.Option("--input", help="JSON lines: prompt, video, answer, …")],
    out: Annotated[Path, typer.Option("--output", help="JSON lines of the gym's schema.")],
    prompt_key: Annotated[str, typer.Option(help="Field of the question.")] = "prompt",
    video_key: Annotated[str, typer.Option(help="Field of the clip.")] = "video",
    audio_key: Annotated[str, typer.Option(help="Field of the sound.")] = "audio",
    agent_name: Annotated[
        str, typer.Option(help="Agent of rows that name none; default: by their verifier.")
    ] = "",
    system_prompt: Annotated[str, typer.Option(help="Put before each question; default: none.")] = "",
    skip_rows_without_video: Annotated[
        bool, typer.Option(help="Leave out rows that name no clip; else they are an error.")
    ] = False,
    skip_missing_local_videos: Annotated[
        bool, typer.Option(help="Leave out rows whose clip is not on this disk; else they are an error.")
    ] = False,
    max_rows: Annotated[int, typer.Option(min=0, help="0 = all.")] = 0,
    deduplicate_prompts: Annotated[
        bool, typer.Option(help="Keep the first of rows with the same question and clip.")
    ] = True,
    several: Several = False,
) -> None:
    """Turn a plain table of questions about clips into the gym's rows. The first bad row ends it, by its line."""
    from omnifleet_trainer.data.gym_convert import Counts, Rules, convert, write_rows

    counts = Counts()
    rules = Rules(
        prompt_key,
        video_key,
        audio_key,
        agent_name,
        system_prompt,
        skip_rows_without_video,
        skip_missing_local_videos,
        max_rows,
        deduplicate_prompts,
        several,
    )
    with _open(source) as lines:
        write_rows(convert(lines, rules, counts), out)
    typer.echo(
        f"{counts.written} rows in {out}; skipped: {counts.duplicates} duplicates, {counts.without_video} without a "
        f"clip, {counts.missing} with a missing one"
    )


@videos.command("validate")
def validate_videos(
    source: Annotated[Path, typer.Option("--input", help="JSON lines of the gym's schema.")],
    roots: Roots = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Have the media service decode every clip and sound.")
    ] = False,
    several: Several = False,
) -> None:
    """Check every row, all faults at once. Status 1 if there is one."""
    faults, rows = asyncio.run(_validated(source, roots or [], decode, several))
    for number, error in faults[:_SHOWN]:
        typer.echo(f"line {number}: {error}")
    typer.echo(f"{rows} rows, {len(faults)} unfit")
    if faults:
        raise typer.Exit(1)


async def _validated(
    source: Path, roots: Sequence[Path], decode: bool, several: bool
) -> tuple[list[tuple[int, OmnifleetError]], int]:
    from omnifleet_trainer.data.gym_convert import numbered
    from omnifleet_trainer.data.gym_decode import decoding
    from omnifleet_trainer.data.gym_rows import check_row

    faults: list[tuple[int, OmnifleetError]] = []
    rows = 0
    async with decoding(roots, wanted=decode) as try_media:
        with _open(source) as lines:
            for number, row in numbered(lines):
                rows += 1
                try:
                    await try_media(check_row(row, roots=roots, several=several))
                except OmnifleetError as error:
                    faults.append((number, error))
    return faults, rows


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise OmnifleetError(Reason.NOT_FOUND, f"{path}: {error}", knob="--input") from error
