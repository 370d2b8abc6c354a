"""`omnifleet trainer`: train a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Trainer service: the asynchronous loop and the policy. Its account: `omnifleet ledger`.",
)

RunDir = Annotated[Path, typer.Option(help="Run folder: recipe, tokens, ledger, checkpoints, metrics.")]


@app.callback()
def root() -> None:
    """Commands have names of their own."""


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

    Goes on from the newest checkpoint if there is one.
    SIGTERM and Ctrl-C: finish the step in hand, write a checkpoint, exit with 143.
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


@app.command()
def follow(
    run_dir: RunDir,
    node: Annotated[
        int, typer.Option(min=1, help="Number of this node among those of the policy; the trainer's is 0.")
    ],
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as one JSON object a line.")] = False,
) -> None:
    """Be this node's ranks of a policy on several nodes, of one life of the trainer after another, until SIGTERM."""
    import signal
    import threading

    from omnifleet.auth import Scope
    from omnifleet.config.recipe import AuthConfig
    from omnifleet.config.trainer import TrainerConfig
    from omnifleet.service import load_section, load_tokens
    from omnifleet.telemetry.logs import set_up_logs
    from omnifleet_trainer.policy.nodes import Meeting
    from omnifleet_trainer.policy.nodes import follow as follow_worlds

    set_up_logs("trainer", as_json=log_json)
    parallel = load_section(run_dir, "trainer", TrainerConfig).parallel
    if node >= parallel.nodes:
        raise typer.BadParameter(f"the policy has {parallel.nodes} node(s), the last is {parallel.nodes - 1}")
    share = parallel.world // parallel.nodes
    tokens = load_tokens(run_dir, load_section(run_dir, "auth", AuthConfig).tokens_file)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    meeting = Meeting(run_dir, tokens.secret(Scope.SERVICE))
    follow_worlds(meeting, range(node * share, (node + 1) * share), stopped)
