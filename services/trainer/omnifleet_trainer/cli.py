"""`omnifleet trainer`: train a run, look into its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from omnifleet_trainer.ledger import LedgerReader

app = typer.Typer(
    no_args_is_help=True, help="Trainer service: the asynchronous loop, the policy, the ledger."
)
ledger = typer.Typer(no_args_is_help=True, help="The account of a run: what was leased, scored, trained on.")
app.add_typer(ledger, name="ledger")

RunDir = Annotated[Path, typer.Option(help="Run folder: recipe, tokens, ledger, checkpoints, metrics.")]
State = Annotated[str, typer.Option(help="Only trajectories that are ready, consumed or expired.")]
Lineage = Annotated[str, typer.Option(help="Only trajectories of this lineage.")]
LedgerFile = Annotated[
    Path | None,
    typer.Option("--file", help="A ledger file, e.g. the copy in a checkpoint. Default: the run's."),
]


@app.command()
def serve(
    run_dir: RunDir,
    resume: Annotated[bool, typer.Option("--resume", help="Insist on a checkpoint to go on from.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Put an earlier life of the run aside and start at step 0.")
    ] = False,
    listen: Annotated[
        str, typer.Option(help="gRPC address HOST:PORT; port 0 = any. Default: the recipe's.")
    ] = "",
    http_listen: Annotated[str, typer.Option(help="HTTP address: health and metrics.")] = "",
    media: Annotated[
        str, typer.Option(help="gRPC address of the media service. Default: found in the run folder.")
    ] = "",
    gateway: Annotated[
        str, typer.Option(help="gRPC address of the gateway. Default: found in the run folder.")
    ] = "",
    reward: Annotated[
        str, typer.Option(help="gRPC address of the reward service. Default: found in the run folder.")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Setting, e.g. trainer.steps=20. Repeatable.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as one JSON object a line.")] = False,
) -> None:
    """Train the run to its last step, then exit with 0.

    Goes on from the newest checkpoint if there is one. SIGTERM and Ctrl-C: finish the step in hand, write a
    checkpoint, exit with 143.
    """
    import asyncio

    from omnifleet.errors import OmnifleetError
    from omnifleet.telemetry.logs import set_up_logs
    from omnifleet_trainer.compat.quiet import quiet_libraries
    from omnifleet_trainer.server.process import serve as serve_trainer

    if resume and fresh:
        raise typer.BadParameter("--resume and --fresh exclude each other")
    set_up_logs("trainer", as_json=log_json)
    quiet_libraries()
    try:
        status = asyncio.run(
            serve_trainer(
                run_dir,
                mode="resume" if resume else "fresh" if fresh else "auto",
                listen=listen,
                http_listen=http_listen,
                media=media,
                gateway=gateway,
                reward=reward,
                overrides=tuple(settings or ()),
            )
        )
    except OmnifleetError as error:
        typer.echo(f"omnifleet: {error}", err=True)
        # 1: starting it again may help, 2: it cannot
        raise typer.Exit(1 if error.retryable else 2) from None
    raise typer.Exit(status)


@ledger.command()
def query(run_dir: RunDir = Path(), file: LedgerFile = None) -> None:
    """Print the account as one JSON object; status 1 if a prompt was lost or trained on twice."""
    import json
    from dataclasses import asdict

    reader = _reader(run_dir, file)
    counts = asdict(reader.counts())
    typer.echo(json.dumps({**counts, "outcomes": reader.outcomes()}, indent=1))
    if counts["consumed_twice"] or counts["lost"]:
        raise typer.Exit(1)


@ledger.command()
def export(
    run_dir: RunDir = Path(),
    file: LedgerFile = None,
    state: State = "",
    lineage: Lineage = "",
    limit: Annotated[int, typer.Option(help="Most trajectories; -1 = all.")] = -1,
) -> None:
    """Print trajectories as JSON lines: tokens, logprobs, version spans, media, reward and its components, step."""
    import json

    from omnifleet.errors import OmnifleetError

    try:
        for row in _reader(run_dir, file).rows(lineage=lineage, state=state, limit=limit):
            typer.echo(json.dumps(row.as_json(), ensure_ascii=False))
    except OmnifleetError as error:
        raise SystemExit(f"omnifleet: {error}") from None


def _reader(run_dir: Path, file: Path | None) -> LedgerReader:
    from omnifleet.errors import OmnifleetError
    from omnifleet_trainer.ledger import LedgerReader

    try:
        return LedgerReader(file or run_dir / "ledger.sqlite")
    except OmnifleetError as error:
        raise SystemExit(f"omnifleet: {error}") from None
