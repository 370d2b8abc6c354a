"""`omnifleet status`: what is up, at which weights, with which queues."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from omnifleet.auth import Scope
from omnifleet.cli.fleet import starting_workers, workers_table
from omnifleet.cli.tables import add_columns, open_table
from omnifleet.cli.where import is_up, secret
from omnifleet.client.fleet import FleetClient, FleetView
from omnifleet.errors import OmnifleetError
from omnifleet.launch.supervisor import read_state
from omnifleet.service import ServiceRecord, read_records
from omnifleet.telemetry.words import duration, told
from omnifleet.wire import (
    common_pb2,
    media_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    trainer_pb2_grpc,
)
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors

_STUBS: dict[str, Any] = {
    "media": media_pb2_grpc.MediaStub,
    "reward": reward_pb2_grpc.RewardStub,
    "gateway": rollout_pb2_grpc.RolloutStub,
    "trainer": trainer_pb2_grpc.TrainerStub,
}


_ENDS_SHOWN = 5
_CALL_S = 5.0


def show_status(run_dir: Path, console: Console, *, as_json: bool) -> None:
    """Ask every service that is up and print one screen, or one JSON object."""
    services, view = asyncio.run(_ask_all(run_dir))
    supervisor = read_state(run_dir)
    if as_json:
        workers = [_worker_json(w) for w in view.workers] if view else []
        body = {"run": run_dir.name, "up": is_up(run_dir), "services": services, "workers": workers}
        body["ends"] = supervisor.get("ends", [])
        if view:
            body["desired_workers"] = view.desired
        console.print_json(json.dumps(body))
        return
    console.print(f"run {run_dir.name}: {'up' if is_up(run_dir) else 'down'}   ({run_dir})", soft_wrap=True)
    if supervisor.get("failure"):
        console.print(f"[red]{escape(supervisor['failure'])}[/red]")
    if services:
        console.print(services_table(services, supervisor), highlight=False)
        console.print(details_table(services), highlight=False)
    elif is_up(run_dir):
        console.print("its services are starting")
    else:
        recipe = run_dir / "recipe.yaml"
        console.print(
            f"no service is up; `omnifleet train {recipe}` goes on", highlight=False, soft_wrap=True
        )
    if view:
        console.print(workers_table(view))
    for line in starting_workers(supervisor if is_up(run_dir) else {}, view):
        console.print(line, highlight=False)
    if supervisor.get("ends"):
        console.print(ends_table(supervisor), highlight=False)


async def ask_service(run_dir: Path, name: str, *, deadline_s: float = _CALL_S) -> dict[str, Any]:
    """Status of one service or worker of a run as a plain mapping: state, uptime_s, facts, counters.

    state: "down" if it has no record, else its own, or why it did not say.
    """
    record = read_records(run_dir).get(name)
    if record is None:
        return {"name": name, "state": "down"}
    return await _ask(record, secret(run_dir, Scope.OPERATOR), deadline_s)


async def _ask_all(run_dir: Path) -> tuple[list[dict[str, Any]], FleetView | None]:
    records, token = read_records(run_dir), secret(run_dir, Scope.OPERATOR)
    known = [records[name] for name in _STUBS if name in records]
    services = list(await asyncio.gather(*(_ask(record, token) for record in known)))
    view = None
    if "gateway" in records:
        try:
            async with FleetClient.open(records["gateway"].grpc, token) as fleet:
                view = await fleet.list()
        except OmnifleetError as error:
            services.append({"name": "fleet", "state": str(error)})
    return services, view


async def _ask(record: ServiceRecord, token: str, deadline_s: float = _CALL_S) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "name": record.name,
        "pid": record.pid,
        "grpc": record.grpc,
        "http": record.http,
    }
    channel = open_channel(record.grpc, token)
    try:
        with remote_errors():
            status = await _STUBS.get(record.name, rollout_pb2_grpc.RolloutStub)(channel).Status(
                common_pb2.StatusRequest(), timeout=deadline_s
            )
    except OmnifleetError as error:
        return {**answer, "state": str(error)}
    finally:
        await channel.close(None)
    counters = {counter.name: counter.value for counter in status.counters}
    return {
        **answer,
        "state": status.state,
        "uptime_s": status.uptime_s,
        "facts": dict(status.facts),
        "counters": counters,
    }


def services_table(services: list[dict[str, Any]], supervisor: dict[str, Any]) -> Group:
    """Who is up since when, and where; below it why somebody does not answer."""
    restarts = {p["name"]: p["restarts"] for p in supervisor.get("processes", ())}
    table = open_table("services", gap=1)
    add_columns(
        table,
        "service",
        "state",
        "up",
        "restarts",
        "gRPC",
        "HTTP",
        right=("restarts",),
        folded=("gRPC", "HTTP"),
    )
    notes = Table.grid(padding=(0, 2, 0, 0))
    for service in services:
        answers = "uptime_s" in service
        if not answers:
            notes.add_row(service["name"], escape(service["state"]))
        table.add_row(
            service["name"],
            service["state"] if answers else "no answer",
            duration(round(service["uptime_s"])) if answers else "",
            str(restarts.get(service["name"], 0)),
            service.get("grpc", ""),
            service.get("http", ""),
        )
    return Group(table, notes) if notes.row_count else Group(table)


def details_table(services: list[dict[str, Any]]) -> Table:
    """What each service is and has counted; workers have a table, payloads by boundary `omnifleet media stat`."""
    table = Table(title="details", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for service in services:
        facts = [f"{key} {value}" for key, value in service.get("facts", {}).items() if _is_own(key)]
        counters = [f"{one.value} {one.words}" for one in told(service.get("counters", {}))]
        lines = [" · ".join(part) for part in (facts, counters) if part]
        if lines:
            table.add_row(service["name"], escape("\n".join(lines)))
    return table


def ends_table(supervisor: dict[str, Any]) -> Table:
    """The processes that ended last, and why."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for end in supervisor.get("ends", ())[-_ENDS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(end["unix"]))
        table.add_row(at, f"{end['name']} (pid {end['pid']})", escape(end["why"]))
    return table


def _is_own(fact: str) -> bool:
    return not fact.startswith("worker ")


def _worker_json(worker: Any) -> dict[str, Any]:
    version = worker.version
    return {
        "id": worker.id,
        "state": worker.state.value,
        "version": str(version) if version else "",
        "running": worker.running,
        "waiting": worker.waiting,
        "kv_usage": worker.kv_usage,
        "tokens_per_s": worker.tokens_per_s,
        "note": worker.note,
    }
