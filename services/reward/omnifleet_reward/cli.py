"""`omnifleet reward`: serve, list scorers, score one reply by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from omnifleet.config.recipe import ScorerConfig

app = typer.Typer(no_args_is_help=True, help="Reward service: versioned scorers in isolated processes.")

Set = Annotated[
    list[str] | None, typer.Option("--set", help="Setting, e.g. reward_service.processes=4. Repeatable.")
]
Module = Annotated[
    list[str] | None,
    typer.Option("--module", help="Module that module:function may name. Repeatable."),
]


@app.command()
def serve(
    run_dir: Annotated[
        Path, typer.Option(help="Run folder: settings, tokens, and the record of who listens where.")
    ],
    listen: Annotated[
        str, typer.Option(help="gRPC address HOST:PORT; port 0 = any. Default: the recipe's.")
    ] = "",
    http_listen: Annotated[str, typer.Option(help="HTTP address: health, metrics, POST /v1/score.")] = "",
    tokens: Annotated[Path | None, typer.Option(help="Tokens file. Default: RUN_DIR/tokens.json.")] = None,
    settings: Set = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as one JSON object a line.")] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from omnifleet.service import run_to_exit
    from omnifleet.telemetry.logs import set_up_logs
    from omnifleet_reward.server import serve as serve_reward

    set_up_logs("reward", as_json=log_json)
    run_to_exit(
        serve_reward(
            run_dir,
            listen=listen,
            http_listen=http_listen,
            overrides=tuple(settings or ()),
            tokens_file=tokens,
        )
    )


@app.command("list")
def list_scorers(modules: Module = None) -> None:
    """List scorers: name@version and what they judge."""
    from omnifleet.errors import OmnifleetError
    from omnifleet_reward.registry import Registry

    try:
        scorers = Registry(modules or ()).known()
    except OmnifleetError as error:
        raise SystemExit(f"omnifleet: {error}") from None
    for scorer in scorers:
        fields = ", ".join(scorer.params.model_fields) or "none"
        typer.echo(f"{scorer.label}\t{scorer.doc}\tparams: {fields}")


@app.command()
def score(
    response: Annotated[str, typer.Argument(help="The reply's text; - reads it from stdin.")],
    ground_truth: Annotated[str, typer.Option("--truth", help="Reference answer.")] = "",
    scorers: Annotated[
        list[str] | None,
        typer.Option("--scorer", help="NAME[@VERSION][=WEIGHT]. Repeatable; default: the demo's."),
    ] = None,
    modules: Module = None,
) -> None:
    """Score one reply in a scorer process, without a running service; prints JSON."""
    import sys

    from omnifleet.service import run_to_exit

    text = sys.stdin.read() if response == "-" else response
    run_to_exit(
        _score(text, ground_truth, scorers or ["format=0.2", "exact_alnum=0.8"], tuple(modules or ()))
    )


async def _score(response: str, ground_truth: str, scorers: list[str], modules: tuple[str, ...]) -> None:
    import json

    from omnifleet.config.services import RewardConfig
    from omnifleet.telemetry.counters import Counters
    from omnifleet_reward.assembly import reward_service
    from omnifleet_reward.scorer import Reply

    async with reward_service(RewardConfig(modules=modules), Counters("reward")) as service:
        configs = [_scorer(text) for text in scorers]
        (scored,), version = await service.score(configs, [Reply(response, ground_truth)])
    if scored.error is not None:
        raise scored.error
    body = {
        "score": scored.total.score,
        "correct": scored.total.correct,
        "components": {label: verdict.score for label, verdict in scored.components},
        "reward_version": version,
    }
    typer.echo(json.dumps(body, indent=2))


def _scorer(text: str) -> ScorerConfig:
    """NAME[@VERSION][=WEIGHT] as a ScorerConfig."""
    from pydantic import ValidationError

    from omnifleet.config.recipe import ScorerConfig
    from omnifleet.errors import invalid

    label, _, weight = text.partition("=")
    name, _, version = label.partition("@")
    try:
        return ScorerConfig.model_validate({"name": name, "version": version, "weight": weight or 1.0})
    except ValidationError:
        raise invalid(f"--scorer {text!r} is not NAME[@VERSION][=WEIGHT] with a weight above 0") from None
