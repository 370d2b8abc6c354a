"""Commands of the rollout service. Imports nothing heavy: each command imports what it runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="A rollout worker: one engine and the server around it.", no_args_is_help=True)
gateway_app = typer.Typer(help="The gateway: the front door and the fleet registry.", no_args_is_help=True)

RunDir = Annotated[Path, typer.Option(help="Folder of the run: recipe.yaml, tokens.json, services/, logs/.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: section.field=value.")
]
LogJson = Annotated[bool, typer.Option("--log-json", help="One JSON object a log line.")]


class EngineKind(StrEnum):
    """`fake` has no model: its tokens are a hash of the prompt. It is for tests."""

    VLLM = "vllm"
    FAKE = "fake"


@app.callback()
def _worker() -> None:
    """A rollout worker: one engine and the server around it."""


@gateway_app.callback()
def _gateway() -> None:
    """The gateway: the front door and the fleet registry."""


@app.command()
def serve(
    run_dir: RunDir,
    name: Annotated[str, typer.Option(help="Name of the worker in the run.")] = "worker-0",
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; default: model.path of the recipe.")
    ] = None,
    engine: Annotated[
        EngineKind, typer.Option(help="Engine; `fake` has no model and is for tests.")
    ] = EngineKind.VLLM,
    listen: Annotated[str, typer.Option(help="gRPC address; default: rollout.listen.")] = "",
    http_listen: Annotated[str, typer.Option(help="HTTP address of health and metrics.")] = "127.0.0.1:0",
    gateway: Annotated[str, typer.Option(help="Gateway's gRPC address; default: from the run folder.")] = "",
    media: Annotated[
        str, typer.Option(help="Media service's gRPC address; default: from the run folder.")
    ] = "",
    fake_token_s: Annotated[float, typer.Option(help="Fake engine only: seconds a token.")] = 0.002,
    set_: Overrides = None,
    log_json: LogJson = False,
) -> None:
    """Serve one engine until SIGTERM, a drain by the fleet, or the engine's death."""
    from omnifleet_rollout.worker.start import Options, start

    start(
        Options(
            run_dir=run_dir,
            name=name,
            model=model,
            engine=str(engine),
            listen=listen,
            http_listen=http_listen,
            gateway=gateway,
            media=media,
            fake_token_s=fake_token_s,
            overrides=tuple(set_ or ()),
            log_json=log_json,
        )
    )


@gateway_app.command("serve")
def gateway_serve(
    run_dir: RunDir,
    listen: Annotated[str, typer.Option(help="gRPC address; default: gateway.listen.")] = "",
    http_listen: Annotated[str, typer.Option(help="HTTP address; default: gateway.http_listen.")] = "",
    media: Annotated[
        str, typer.Option(help="Media service's gRPC address; default: from the run folder.")
    ] = "",
    new_life: Annotated[
        bool,
        typer.Option(
            "--new-life", help="The run starts again: forget which weights its last trainer announced."
        ),
    ] = False,
    set_: Overrides = None,
    log_json: LogJson = False,
) -> None:
    """Serve the OpenAI routes, gRPC Generate and the fleet registry until SIGTERM."""
    from omnifleet_rollout.gateway.command import serve_gateway

    serve_gateway(run_dir, listen, http_listen, media, tuple(set_ or ()), log_json, new_life=new_life)
