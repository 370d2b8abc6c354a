"""`omnifleet fleet`: look at the rollout workers and change the fleet while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from omnifleet.auth import Scope
from omnifleet.cli.tables import add_columns, open_table
from omnifleet.cli.where import RunOption, find_run, secret, service
from omnifleet.client.fleet import FleetClient, FleetView, Verb
from omnifleet.launch.supervisor import read_state

app = typer.Typer(
    no_args_is_help=True,
    help="List, scale, drain, cordon, pin and retire rollout workers while a run goes on.",
)
WorkerArgument = Annotated[
    str, typer.Argument(help="Its id in `omnifleet fleet list`, or the name in it, e.g. worker-0.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Kept with the worker, shown in the list.")]
Result = TypeVar("Result")


def with_fleet(run: str, act: Callable[[FleetClient], Awaitable[Result]]) -> Result:
    """Run one call against the registry of a run."""

    async def call() -> Result:
        run_dir = find_run(run)
        async with FleetClient.open(
            service(run_dir, "gateway").grpc, secret(run_dir, Scope.OPERATOR)
        ) as fleet:
            return await act(fleet)

    return asyncio.run(call())


def starting_workers(supervisor: dict[str, Any], view: FleetView | None) -> list[str]:
    """A line for each worker whose process lives and that the registry does not know yet."""
    known = {worker.id.rpartition("-")[0] for worker in view.workers} if view else set()
    return [
        f"{p['name']} is starting, for {p.get('since_s', 0):.0f} s (pid {p['pid']})"
        for p in supervisor.get("processes", ())
        if p["name"].startswith("worker-") and p["name"] not in known and p["state"] == "running"
    ]


def workers_table(view: FleetView) -> Group:
    """The fleet as a table: state, weights, load; below it why a worker is in its state, where there is something to say."""
    target = view.target_version
    table = open_table(f"workers (wanted {view.desired}, weights {target.number if target else 'base'})")
    numbers = ("weights", "running", "waiting", "KV", "tok/s")
    add_columns(table, "worker", "state", *numbers, right=numbers, folded=("worker",))
    notes = Table.grid(padding=(0, 2, 0, 0))
    for w in view.workers:
        version = str(w.version.number) if w.version and w.version.lineage != "base" else "base"
        load = (str(w.running), str(w.waiting), f"{w.kv_usage:.0%}", f"{w.tokens_per_s:.0f}")
        table.add_row(w.id, f"{w.state.value}{', pinned' if w.pinned else ''}", version, *load)
        if w.note:
            notes.add_row(w.id, escape(w.note))
    return Group(table, notes) if notes.row_count else Group(table)


@app.command("list")
def list_workers(run: RunOption = "") -> None:
    """List the workers with their state, weight version and load, and why they are in that state."""
    view, console = with_fleet(run, lambda fleet: fleet.list()), Console()
    console.print(workers_table(view))
    for line in starting_workers(read_state(find_run(run)), view):
        console.print(line, highlight=False)


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(min=0, help="Workers to run.")],
    run: RunOption = "",
    reason: ReasonOption = "operator",
) -> None:
    """Change the number of workers. New ones serve once they have the current weights; surplus ones drain first."""
    _, draining = with_fleet(run, lambda fleet: fleet.scale(workers, reason=reason))
    typer.echo(f"wanted: {workers} worker(s)" + (f"; draining {', '.join(draining)}" if draining else ""))


def _add_verb(verb: Verb, said: str, doc: str) -> None:
    def act(worker: WorkerArgument, run: RunOption = "", reason: ReasonOption = "operator") -> None:
        view = with_fleet(run, lambda fleet: fleet.act(verb, worker, reason))
        typer.echo(f"{view.id} {said} (state {view.state.value})")

    app.command(str(verb), help=doc)(act)


_add_verb(
    Verb.DRAIN,
    "is draining",
    "Let a worker finish what it has and leave; the launcher starts another if the fleet is then too small.",
)
_add_verb(Verb.CORDON, "is cordoned", "Let a worker keep its sessions and take no new ones.")
_add_verb(Verb.UNCORDON, "takes sessions again", "Let a cordoned worker take new sessions again.")
_add_verb(Verb.PIN, "is pinned", "Keep a worker when the fleet is scaled down: others drain.")
_add_verb(Verb.UNPIN, "is not pinned", "Let a pinned worker drain again when the fleet is scaled down.")
_add_verb(
    Verb.RETIRE,
    "is retired",
    "Let a worker go now, without draining; its samples go on elsewhere, and the launcher starts another.",
)
