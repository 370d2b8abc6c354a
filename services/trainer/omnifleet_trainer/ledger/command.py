"""`omnifleet ledger`: ask a run's account, take it elsewhere, hold a step against what it said."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omnifleet.cli.where import RunOption, find_run
from omnifleet.errors import invalid

if TYPE_CHECKING:
    from omnifleet_trainer.ledger import LedgerReader
    from omnifleet_trainer.ledger.replay import Check

app = typer.Typer(
    no_args_is_help=True,
    help="""The account of a run: what was leased, scored, trained on; safe to ask while it trains.

`query` shows whether anything was lost or trained twice; `query --sql` asks anything else.
`export` writes trajectories as JSON lines or Parquet.
`replay --step N` recomputes a step's numbers from the ledger and compares them with metrics.jsonl.""",
)

LedgerFile = Annotated[
    Path | None,
    typer.Option("--file", help="A ledger file, e.g. the copy in a checkpoint. Default: the run's."),
]
State = Annotated[str, typer.Option(help="Only trajectories that are ready, consumed or expired.")]
Lineage = Annotated[str, typer.Option(help="Only trajectories of this lineage.")]


@app.command()
def query(
    run: RunOption = "",
    file: LedgerFile = None,
    sql: Annotated[
        str,
        typer.Option(
            help="One SELECT of your own over the tables lineages, occurrences, attempts, leases, groups, trajectories, "
            "weights, consumptions; rows as JSON lines, at most --limit."
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many rows of --sql.")] = 1000,
) -> None:
    """Print the account as one JSON object; status 1 if a prompt was lost or trained on twice."""
    reader = _reader(run, file)
    if sql:
        names, rows = reader.select(sql, limit=limit)
        for row in rows:
            typer.echo(json.dumps(dict(zip(names, row, strict=True)), default=_bytes, ensure_ascii=False))
        return
    with reader.one_look() as look:
        counts, outcomes = asdict(look.counts()), look.outcomes()
    typer.echo(json.dumps({**counts, "outcomes": outcomes}, indent=1))
    if counts["consumed_twice"] or counts["lost"]:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunOption = "",
    file: LedgerFile = None,
    state: State = "",
    lineage: Lineage = "",
    step: Annotated[int, typer.Option(min=0, help="Only what this step trained; 0 = all.")] = 0,
    limit: Annotated[int, typer.Option(help="At most so many trajectories; -1 = all.")] = -1,
    out: Annotated[
        Path | None, typer.Option(help="File to write; .parquet or .jsonl. Default: JSON lines on stdout.")
    ] = None,
) -> None:
    """Write trajectories: tokens, logprobs, version spans, media, reward and its components, step."""
    from omnifleet_trainer.ledger.export import write_json_lines, write_parquet

    reader = _reader(run, file)
    rows = reader.rows(lineage=lineage, state=state, step=step, limit=limit)
    if out is None:
        write_json_lines(rows, sys.stdout)
        return
    if out.suffix == ".parquet":
        count = write_parquet(rows, out, told=_tell)
    elif out.suffix == ".jsonl":
        with out.open("w", encoding="utf-8") as target:
            count = write_json_lines(rows, target)
    else:
        raise invalid(f"{out}: a .parquet or .jsonl file is written", knob="--out")
    typer.echo(f"{count} trajectories in {out}", err=True)


@app.command()
def replay(
    step: Annotated[int, typer.Option(min=1, help="Step to look at.")],
    run: RunOption = "",
    file: LedgerFile = None,
    show: Annotated[
        Literal["checks", "groups"], typer.Option(help="Numbers of the step, or its groups.")
    ] = "checks",
) -> None:
    """Recompute a step from what it was trained on; status 1 if a number is not what the run recorded."""
    from rich.console import Console
    from rich.table import Table

    from omnifleet_trainer.ledger.replay import recorded_step, step_rows
    from omnifleet_trainer.ledger.replay import replay as recompute

    rows = step_rows(_reader(run, file), step)
    console = Console()
    if show == "groups":
        for row in rows:
            reply = row.own.get("text", "(payload gone)")
            console.print(
                f"{row.prompt_id}  {row.reward:.3f}  {row.reward_version}  {reply!r}",
                highlight=False,
                markup=False,
            )
        return
    checks = recompute(rows, {} if file else recorded_step(find_run(run), step))
    table = Table("number", "ledger", "recorded", "verdict", title=f"step {step}", title_justify="left")
    for check in checks:
        said = "-" if check.recorded is None else f"{check.recorded:.6g}"
        table.add_row(check.name, f"{check.ledger:.6g}", said, _verdict(check))
    console.print(table)
    if not all(check.holds for check in checks):
        raise typer.Exit(1)


def _verdict(check: Check) -> str:
    if check.recorded is None:
        return "not recorded"
    return "same" if check.holds else "DIFFERS"


def _reader(run: str, file: Path | None) -> LedgerReader:
    from omnifleet_trainer.ledger import LedgerReader

    return LedgerReader(file or find_run(run) / "ledger.sqlite")


def _tell(count: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{count} trajectories", err=True, nl=False)


def _bytes(value: Any) -> str:
    """Payloads are blobs; their size says enough."""
    return f"<{len(value)} bytes>"
