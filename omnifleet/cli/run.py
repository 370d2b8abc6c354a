"""`omnifleet up | train | status | logs | down`: one run on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnifleet.cli.config import OverrideArgument, RecipeArgument, check_model
from omnifleet.cli.where import RunOption, find_run, is_up, run_recipe
from omnifleet.config import load_recipe
from omnifleet.config.cluster import ClusterConfig
from omnifleet.config.recipe import UNTAUGHT, Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.local import wait_gone
from omnifleet.launch.plan import ORDER, check_unchanged, newest_weights, prepare_run
from omnifleet.launch.port import Launcher
from omnifleet.launch.supervisor import last_line, read_state, read_wanted, want
from omnifleet.report.records import read_mapping
from omnifleet.service import read_records

_POLL_S = 0.1
_COUNT_S = 2.0
JsonOption = Annotated[bool, typer.Option("--log-json", help="Logs as one JSON object a line.")]
LauncherOption = Annotated[str, typer.Option("--launcher", help="Who starts processes: local or ray.")]
EngineOption = Annotated[str, typer.Option("--engine", hidden=True)]
console = Console()


def add_to(app: typer.Typer) -> None:
    """Add the commands to the root app."""
    app.command()(up)
    app.command()(train)
    app.command()(status)
    app.command()(logs)
    app.command()(down)
    app.command(hidden=True)(supervise)


def resolve_model(recipe_name: str, overrides: list[str], launcher: str = "local") -> Recipe:
    """Load a recipe; `model.path: tiny` becomes the cached tiny checkpoint, made now if need be.

    What can't come up is said first: raises PORT_TAKEN, MODEL_MISSING.
    """
    recipe = load_recipe(recipe_name, overrides)
    if launcher == "local" and not is_up(recipe.run_dir):
        check_ports(recipe)
    if recipe.model.path != "tiny":
        check_model(recipe)
        return recipe
    family = recipe.model.family or ("qwen2_5_vl" if recipe.trainer.backend == "megatron" else "qwen2_vl")
    command = [sys.executable, "-m", "omnifleet", "tiny-model", "--seed", str(recipe.run.seed)]
    command += ["--family", family, *(["--no-warm-start"] if family in UNTAUGHT else [])]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode != 0:
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            "the tiny model could not be made (see above); it needs the omnifleet-trainer distribution",
            knob="model.path",
        )
    return load_recipe(recipe_name, [*overrides, f"model.path={made.stdout.strip().splitlines()[-1]}"])


def check_ports(recipe: Recipe) -> None:
    """Raises PORT_TAKEN if another program of this machine listens where a service of the recipe is to."""
    for section in ("media", "reward_service", "gateway", "trainer"):
        for field in ("listen", "http_listen"):
            host, _, port = getattr(getattr(recipe, section), field).rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host.strip("[]"), int(port)))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:  # the rest is the service's to say
                        message = f"{host}:{port} is taken; 0 picks a free port"
                        raise OmnifleetError(Reason.PORT_TAKEN, message, knob=f"{section}.{field}") from error


def start_services(
    recipe: Recipe, *, as_json: bool = False, launcher: str = "local", engine: str = "vllm"
) -> Path:
    """Bring up the run's services (a supervisor in the background tends them) and wait until workers can serve."""
    if is_up(recipe.run_dir):
        running = recipe.run_dir.resolve()
        check_unchanged(run_recipe(running), recipe, training=bool(read_wanted(running).get("train")))
    run_dir = prepare_run(recipe)
    if not is_up(run_dir):
        said = [
            run_dir / "supervisor.json",
            run_dir / "wanted.json",
            *(run_dir / "services").glob("[!.]*.json"),
        ]
        for stale in said:  # by an earlier life of the run, perhaps on another host
            stale.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "omnifleet",
            "supervise",
            str(run_dir),
            "--launcher",
            launcher,
            "--engine",
            engine,
        ]
        with (run_dir / "logs" / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                command + (["--log-json"] if as_json else []),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _wait_ready(run_dir, recipe.rollout.workers, lambda: supervisor.poll() is None)
    else:
        _wait_ready(run_dir, recipe.rollout.workers, lambda: is_up(run_dir))
    return run_dir


def _wait_ready(
    run_dir: Path, workers: int, supervised: Callable[[], bool], deadline_s: float = 600.0
) -> None:
    began = time.monotonic()
    with console.status("starting services") as shown:
        while time.monotonic() - began < deadline_s:
            lives = supervised()  # asked first: what it said last is then there
            state = read_state(run_dir)
            if state.get("failure"):
                stop_services(run_dir)
                raise OmnifleetError(Reason.UNAVAILABLE, f"{state['failure']} (logs: {run_dir}/logs)")
            if not lives:
                raise OmnifleetError(
                    Reason.UNAVAILABLE,
                    f"the supervisor of {run_dir.name} ended: {last_line(run_dir / 'logs' / 'supervisor.log')}",
                    knob=f"{run_dir}/logs/supervisor.log",
                )
            records = read_records(run_dir)
            ready = [name for name in records if name in ORDER or name.startswith("worker-")]
            if sum(name.startswith("worker-") for name in ready) >= workers and set(ORDER) <= set(ready):
                console.print(f"services up in {time.monotonic() - began:.0f} s: {', '.join(sorted(ready))}")
                return
            shown.update(
                f"starting services: {', '.join(sorted(ready)) or 'none yet'} ({time.monotonic() - began:.0f} s)"
            )
            time.sleep(_POLL_S)
    raise OmnifleetError(
        Reason.DEADLINE,
        f"services of {run_dir.name} were not up after {deadline_s:.0f} s",
        knob="omnifleet logs",
    )


def stop_services(run_dir: Path) -> None:
    """Stop the supervisor, which stops all it started. Harmless if nothing is up."""
    pid = int(read_state(run_dir).get("pid", 0))
    if not is_up(run_dir):
        return
    os.kill(pid, signal.SIGTERM)
    if not wait_gone(pid, 90.0):
        os.kill(pid, signal.SIGKILL)  # its children get SIGTERM from the kernel


def up(
    recipe: RecipeArgument,
    overrides: OverrideArgument = None,
    log_json: JsonOption = False,
    launcher: LauncherOption = "local",
    engine: EngineOption = "vllm",
) -> None:
    """Start media, reward, gateway and rollout workers of a recipe, and keep them alive in the background."""
    loaded = resolve_model(recipe, overrides or [], launcher)
    try:
        run_dir = start_services(loaded, as_json=log_json, launcher=launcher, engine=engine)
    except KeyboardInterrupt:
        console.print("stopping what was started")
        stop_services(loaded.run_dir)
        raise typer.Exit(130) from None
    weights = newest_weights(run_dir)
    console.print(f"serving {f'the weights of {weights.parent.name}' if weights else loaded.model.path}")
    again = " ".join([recipe, *(overrides or [])])
    console.print(
        f"run folder {run_dir}\nnext: omnifleet train {again}   |   omnifleet status   |   omnifleet down",
        soft_wrap=True,
    )


def train(
    recipe: RecipeArgument,
    overrides: OverrideArgument = None,
    log_json: JsonOption = False,
    launcher: LauncherOption = "local",
    keep_up: Annotated[
        bool, typer.Option("--keep-up", help="Leave the services up when training ends.")
    ] = False,
    engine: EngineOption = "vllm",
) -> None:
    """Train a recipe: start what is not up, resume from the newest checkpoint, show progress, write a report at the end.

    Ctrl-C checkpoints and stops; the same command goes on from there.
    """
    from omnifleet.cli.counted import try_to_keep
    from omnifleet.cli.watch import watch_training

    loaded = resolve_model(recipe, overrides or [], launcher)
    if _is_done(loaded):
        console.print(f"{loaded.run.name} is done: {_outcome(loaded.run_dir)}", soft_wrap=True)
        console.print("trainer.steps=N extends it, run.name=NAME starts another", highlight=False)
        return
    was_up = is_up(loaded.run_dir)
    run_dir = start_services(loaded, as_json=log_json, launcher=launcher, engine=engine)
    want(run_dir, train=True)
    take_sigterm_for_ctrl_c()
    try:
        finished = watch_training(run_dir, loaded, console)
        if finished:
            _write_report(run_dir, loaded)  # while its services are up
    except KeyboardInterrupt:
        console.print("stopping: the trainer ends its step and writes a checkpoint")
        finished = False
    finally:
        want(run_dir, train=False)
        try:
            if lost := try_to_keep(run_dir, deadline_s=_COUNT_S):  # the run's next life counts from 0
                console.print(f"what the services counted is not kept: {lost}", markup=False, soft_wrap=True)
        finally:
            if not was_up and not keep_up:
                stop_services(run_dir)
    if finished:
        console.print(f"{loaded.run.name}: {_outcome(run_dir)}", soft_wrap=True)
    else:
        weights = newest_weights(run_dir)
        at = f"at {weights.parent.name}" if weights else "before the first checkpoint"
        console.print(f"stopped {at}; the same command goes on from there", highlight=False)
        failure = read_state(run_dir).get("failure", "")
        raise typer.Exit(1 if failure else 130)


def take_sigterm_for_ctrl_c() -> None:
    """A scheduler's stop is a Ctrl-C. Sent on as the signal and not raised here: an event loop that runs just then ends what
    it does first, where an exception out of nowhere would leave gRPC's memory in pieces. What a shell starts in the background
    begins with Ctrl-C ignored: it would hear of no stop at all."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def _write_report(run_dir: Path, recipe: Recipe) -> None:
    """A run that trained well has not failed because nobody could draw it."""
    from omnifleet.cli.report import write_report

    try:
        console.print(f"report: {write_report(run_dir, recipe).page}", soft_wrap=True, highlight=False)
    except (OmnifleetError, OSError) as error:
        console.print(f"no report: {error}; try `omnifleet report {run_dir}`", markup=False, soft_wrap=True)


def _is_done(recipe: Recipe) -> bool:
    """True if the run has trained all its steps and ended well."""
    summary = read_mapping(recipe.run_dir / "summary.json")
    settled = bool(summary.get("settled")) and recipe.evaluation.patience is not None
    return bool(summary) and (settled or int(summary["steps"]) >= recipe.trainer.steps)


def _outcome(run_dir: Path) -> str:
    """What a run came to, and where to look."""
    summary = read_mapping(run_dir / "summary.json")
    if not summary:
        return f"run folder {run_dir}"
    ledger = summary["ledger"]
    return (
        f"{summary['steps']} steps, held-out reward {summary['heldout_start']:.3f} → {summary['heldout_end']:.3f}, "
        f"{ledger['consumed']} samples trained, {ledger['consumed_twice']} twice\n"
        f"weights {newest_weights(run_dir) or 'none'}\n"
        f"next: omnifleet ledger replay --step {summary['steps']} --run {run_dir.name}   |   "
        f"omnifleet up {run_dir / 'recipe.yaml'} (serves these weights)"
    )


def status(
    run: RunOption = "", as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """Show the services, weight versions, queues and workers of a run."""
    from omnifleet.cli.status import show_status

    show_status(find_run(run), console, as_json=as_json)


def logs(
    service: Annotated[
        str, typer.Argument(help="media, reward, gateway, trainer, worker-N, supervisor; default: all.")
    ] = "",
    run: RunOption = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[int, typer.Option("-n", min=1, help="Last lines of each.")] = 20,
) -> None:
    """Show the last lines of a run's logs."""
    folder = find_run(run) / "logs"
    files = sorted(folder.glob(f"{service or '*'}.log"))
    if not files:
        known = ", ".join(sorted(p.stem for p in folder.glob("*.log"))) or "none"
        raise OmnifleetError(
            Reason.NOT_FOUND, f"no log of {service or 'any service'} in {folder}; there are: {known}"
        )
    if not any(path.stat().st_size for path in files):
        console.print(f"{', '.join(path.stem for path in files)} said nothing yet")
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *map(str, files)]
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run(command, check=False)


def down(run: RunOption = "") -> None:
    """Stop all services of a run. Nothing is lost: `omnifleet train` goes on from the newest checkpoint."""
    run_dir = find_run(run)
    if not is_up(run_dir):
        console.print(f"{run_dir.name} is not up")
        return
    with console.status(f"stopping {run_dir.name}"):
        want(run_dir, train=False)
        stop_services(run_dir)
    console.print(f"{run_dir.name} is down")


def supervise(
    run_dir: Path,
    launcher: LauncherOption = "local",
    log_json: JsonOption = False,
    engine: EngineOption = "vllm",
) -> None:
    """The background process of `up` and `train`."""
    from omnifleet.launch.supervisor import Supervisor
    from omnifleet.service import run_to_exit, until_stopped
    from omnifleet.telemetry.logs import set_up_logs

    set_up_logs("supervisor", as_json=log_json)

    async def tend() -> None:
        stopped = asyncio.Event()
        recipe = run_recipe(run_dir)
        supervisor = Supervisor(
            run_dir, recipe, make_launcher(launcher, recipe.cluster), as_json=log_json, engine=engine
        )
        tending = asyncio.create_task(supervisor.run(stopped))
        stopping = asyncio.create_task(until_stopped())
        await asyncio.wait({tending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopped.set()
        stopping.cancel()
        await tending

    run_to_exit(tend())


def make_launcher(name: str, cluster: ClusterConfig | None = None) -> Launcher:
    """A launcher by name; `cluster`: what a local one deals the GPUs out by. Raises INVALID_CONFIG for an unknown name."""
    if name == "local":
        from omnifleet.launch.gpus import HostGpus
        from omnifleet.launch.local import LocalLauncher

        return LocalLauncher(HostGpus.of(cluster))
    if name == "ray":
        from omnifleet.launch.ray_launcher import RayLauncher

        return RayLauncher()
    raise OmnifleetError(
        Reason.INVALID_CONFIG, f"launcher {name!r}: allowed are local, ray", knob="--launcher"
    )
