"""`omnifleet reward`: serve, list scorers, score one reply by hand, score a run's ledger again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnifleet.cli.where import find_run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omnifleet.config.recipe import ScorerConfig
    from omnifleet.config.services import RewardConfig
    from omnifleet_reward.rescore import Change

app = typer.Typer(no_args_is_help=True, help="Reward service: versioned scorers in isolated processes.")

Set = Annotated[
    list[str] | None, typer.Option("--set", help="Setting, e.g. reward_service.processes=4. Repeatable.")
]
Module = Annotated[
    list[str] | None,
    typer.Option("--module", help="Module that module:function may name. Repeatable."),
]
Scorers = Annotated[list[str] | None, typer.Option("--scorer", help="NAME[@VERSION][=WEIGHT]. Repeatable.")]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", help="NAME.FIELD=VALUE: a scorer's parameter, VALUE in YAML. Repeatable."),
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
    scorers: Scorers = None,
    params: Params = None,
    extra: Annotated[str, typer.Option(help="Fields of the dataset row, a JSON object.")] = "{}",
    prompt_suffix: Annotated[str, typer.Option(help="What the chat template opened, e.g. <think>.")] = "",
    modules: Module = None,
    settings: Set = None,
) -> None:
    """Score one reply without a running service; prints JSON. Without --scorer: the demo's reward."""
    import json
    import sys

    from omnifleet.errors import invalid
    from omnifleet.service import run_to_exit
    from omnifleet_reward.scorer import Reply

    async def main() -> None:
        configs = parse_scorers(scorers or ["format=0.2", "exact_alnum=0.8"], params or ())
        config = _settings(None, settings, modules)
        try:
            row = json.loads(extra)
        except ValueError as error:
            raise invalid(f"--extra is not JSON: {error}", knob="--extra") from None
        text = sys.stdin.read() if response == "-" else response
        reply = Reply(text, ground_truth, extra=row, prompt_suffix=prompt_suffix)
        typer.echo(json.dumps(await _scored(config, configs, reply), indent=2))

    run_to_exit(main())


@app.command()
def rescore(
    run: Annotated[str, typer.Argument(help="Run folder or name. Default: the newest run here.")] = "",
    scorers: Scorers = None,
    params: Params = None,
    modules: Module = None,
    file: Annotated[
        Path | None, typer.Option(help="JSON lines of `omnifleet ledger export` instead of the run's ledger.")
    ] = None,
    state: Annotated[str, typer.Option(help="Only ready, consumed or expired trajectories.")] = "",
    step: Annotated[int, typer.Option(min=0, help="Only what this step trained; 0 = all.")] = 0,
    limit: Annotated[int, typer.Option(help="Most trajectories; -1 = all.")] = -1,
    show: Annotated[int, typer.Option(min=0, help="Rows of the table, largest change first.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Report of all trajectories: .csv, .json or .jsonl.")
    ] = None,
    settings: Set = None,
) -> None:
    """Score a run's trajectories again and say what changes. The ledger is only read.

    Without --scorer: the recipe's reward, in the newest versions that it allows.
    Scores are not written back: those in the ledger are what the run was trained on.
    """
    from omnifleet.errors import invalid
    from omnifleet.service import run_to_exit
    from omnifleet_reward import rescore as ledger

    async def main() -> None:
        run_dir = None if file and not run else find_run(run)
        if out is not None:
            ledger.check_report(out)
        if run_dir is None and not scorers:
            raise invalid("--file names no recipe: say which scorers", knob="--scorer")
        configs = parse_scorers(scorers, params or ()) if scorers else recipe_scorers(run_dir or Path())
        config = _settings(run_dir, settings, modules)
        if file is not None:
            rows = ledger.file_rows(file)
        else:
            rows = ledger.ledger_rows(run_dir or Path(), state=state, step=step, limit=limit)
        missing: list[str] = []
        changes = await _rescored(config, configs, ledger.kept(rows, missing), run_dir)
        if out is not None:
            ledger.write_report(changes, out)
        _print_changes(changes, show)
        if missing:
            typer.echo(
                f"{len(missing)} more are recorded without reply or reference: pruned, or of an earlier release"
            )

    run_to_exit(main())


def _settings(run_dir: Path | None, overrides: list[str] | None, modules: list[str] | None) -> RewardConfig:
    """Settings of a run, or the defaults, with what the command line says."""
    from omnifleet.config.services import RewardConfig
    from omnifleet.service import load_section

    config = load_section(
        run_dir or Path("/dev/null"), "reward_service", RewardConfig, tuple(overrides or ())
    )
    return config.model_copy(update={"modules": (*config.modules, *(modules or ()))})


async def _scored(config: RewardConfig, configs: list[ScorerConfig], reply: object) -> dict[str, object]:
    from omnifleet.telemetry.counters import Counters
    from omnifleet_reward.assembly import reward_service
    from omnifleet_reward.scorer import Reply

    assert isinstance(reply, Reply)
    async with reward_service(config, Counters("reward")) as service:
        (scored,), version = await service.score(configs, [reply])
    if scored.error is not None:
        raise scored.error
    return {
        "score": scored.total.score,
        "correct": scored.total.correct,
        "mark": scored.total.mark,
        "components": {label: verdict.score for label, verdict in scored.components},
        "reward_version": version,
    }


async def _rescored(
    config: RewardConfig, configs: list[ScorerConfig], rows: Iterable[dict[str, object]], run_dir: Path | None
) -> list[Change]:
    from rich.console import Console

    from omnifleet.telemetry.counters import Counters
    from omnifleet_reward.assembly import reward_service
    from omnifleet_reward.rescore import rescore as score_again

    changes: list[Change] = []
    console = Console(stderr=True)
    async with reward_service(config, Counters("reward"), run_dir=run_dir) as service:
        service.version(configs)  # wrong names are told before the ledger is read
        with console.status("scoring") as status:
            async for some in score_again(service, configs, rows):
                changes += some
                status.update(f"{len(changes)} trajectories scored")
    return changes


def _print_changes(changes: list[Change], show: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from omnifleet_reward.rescore import summarise

    console = Console()
    table = Table("trajectory", "step", "old", "new", "components", "reply", box=None)
    differing = sorted(
        (change for change in changes if change.differs),
        key=lambda change: -abs((change.new if change.new is not None else float("inf")) - change.old),
    )
    for change in differing[:show]:
        new = f"{change.new:.4g}" if change.new is not None else change.error.partition(":")[0]
        parts = " ".join(f"{label}={score:.4g}" for label, score in change.new_components.items())
        reply = repr(change.text[-40:])
        table.add_row(change.trajectory, str(change.step), f"{change.old:.4g}", new, parts, reply)
    if differing and show:
        console.print(table)
    total = summarise(changes)
    typer.echo(
        f"{total.trajectories} trajectories, {total.changed} changed, {total.unscorable} unscorable; "
        f"{total.reordered} groups in another order; mean {total.old_mean:.4f} -> {total.new_mean:.4f}"
    )
    for label in sorted({f"{change.old_version} -> {change.new_version}" for change in changes}):
        typer.echo(label)


def parse_scorers(texts: list[str], params: Iterable[str]) -> list[ScorerConfig]:
    """Scorers of a command line. Raises INVALID_REQUEST."""
    import yaml

    from omnifleet.config.recipe import ScorerConfig
    from omnifleet.errors import invalid

    configs = {config.name: config for config in map(_scorer, texts)}
    for text in params:
        key, given, value = text.partition("=")
        name, _, field = key.rpartition(".")
        if not given or name not in configs:
            raise invalid(
                f"--param {text!r} is not NAME.FIELD=VALUE with one of {', '.join(configs)}", knob="--param"
            )
        try:
            told = configs[name].params | {field: yaml.safe_load(value)}
        except yaml.YAMLError as error:
            raise invalid(f"--param {text!r}: {error}", knob="--param") from None
        configs[name] = ScorerConfig.model_validate(configs[name].model_dump() | {"params": told})
    return list(configs.values())


def recipe_scorers(run_dir: Path) -> list[ScorerConfig]:
    """The reward of a run's recipe. Raises INVALID_CONFIG."""
    import yaml

    from omnifleet.config.recipe import ScorerConfig
    from omnifleet.errors import Reason, invalid

    try:
        body = yaml.safe_load((run_dir / "recipe.yaml").read_text())
        return [ScorerConfig.model_validate(scorer) for scorer in body["reward"]]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        message = f"{run_dir} has no recipe.yaml with a reward: {error}"
        raise invalid(message, knob="--scorer", reason=Reason.INVALID_CONFIG) from None


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
