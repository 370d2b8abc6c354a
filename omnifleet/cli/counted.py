"""Ask the processes of a run what they have counted, and keep it: who ended since the last look is kept as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from omnifleet.auth import Scope
from omnifleet.cli.status import ask_service
from omnifleet.cli.where import secret
from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.errors import OmnifleetError
from omnifleet.launch.supervisor import read_state
from omnifleet.report.lives import Life, merged, read_lives, write_lives
from omnifleet.report.records import read_mapping
from omnifleet.service import ServiceRecord, read_records
from omnifleet.types import WorkerState

_DEADLINE_S = 5.0


def keep_counters(run_dir: Path, *, deadline_s: float = _DEADLINE_S) -> list[Life]:
    """Write counters.json and return it, oldest process first. Whoever does not answer stays as it was seen last.

    Takes about `deadline_s` seconds at most. Payloads of boundaries are left out.
    """
    records, known = read_records(run_dir), read_lives(run_dir)
    ends = [(end["name"], end["pid"], _short(end["why"])) for end in read_state(run_dir).get("ends", ())]
    seen, workers = asyncio.run(_look(run_dir, records, deadline_s))
    lives = merged(known, seen)
    by_pid = {pid: why for _, pid, why in ends}
    lives = merged(lives, [_of_registry(worker, lives, by_pid) for worker in workers])
    lives = merged(lives, _at_the_end(run_dir))
    lives = _ended(lives, records, workers, {name: why for name, _, why in ends})
    write_lives(run_dir, lives)
    return lives


def try_to_keep(run_dir: Path, *, deadline_s: float) -> str:
    """`keep_counters` where a run must not end because nobody could count: why not, "" if all is well."""
    try:
        keep_counters(run_dir, deadline_s=deadline_s)
    except (OmnifleetError, OSError) as error:
        return str(error)
    return ""


async def _look(
    run_dir: Path, records: Mapping[str, ServiceRecord], deadline_s: float
) -> tuple[list[Life], list[WorkerView]]:
    """Who answers, and all workers that the registry knows, those that are gone, too; [] if it does not answer."""

    async def one(record: ServiceRecord) -> list[Life]:
        said = (await ask_service(run_dir, record.name, deadline_s=deadline_s)).get("counters")
        if said is None:
            return []
        return [Life(record.name, record.instance, record.started_unix, _own(said))]

    async def fleet() -> list[WorkerView]:
        if "gateway" not in records:
            return []
        try:
            async with FleetClient.open(records["gateway"].grpc, secret(run_dir, Scope.OPERATOR)) as client:
                return (await client.list(include_gone=True, deadline_s=deadline_s)).workers
        except OmnifleetError:
            return []

    services = asyncio.gather(*(one(record) for record in records.values()))
    workers, asked = await asyncio.gather(fleet(), services)
    return [life for found in asked for life in found], workers


def _of_registry(worker: WorkerView, lives: list[Life], ends: Mapping[int, str]) -> Life:
    """A worker as of its last heartbeat; how it ended, if it is gone."""
    who = worker.id.rpartition("-")[0]
    began = next((life.began for life in lives if (life.who, life.instance) == (who, worker.instance)), 0.0)
    why = ends.get(worker.pid, "") if worker.state is WorkerState.DEAD else ""
    ended = f"{worker.state.value}: {why or worker.note}" if worker.state.gone else ""
    return Life(who, worker.instance, began, _own(worker.counters), ended)


def _at_the_end(run_dir: Path) -> list[Life]:
    """The trainer that wrote the summary may have left before anybody looked: what it counted is there."""
    path = run_dir / "summary.json"
    summary = read_mapping(path)
    if not summary.get("instance"):
        return []
    return [Life("trainer", summary["instance"], path.stat().st_mtime, _own(summary["counters"]))]


def _ended(
    lives: list[Life],
    records: Mapping[str, ServiceRecord],
    workers: list[WorkerView],
    ends: Mapping[str, str],
) -> list[Life]:
    """Say of each service's life that another followed how it ended; of a worker that nobody knows any more, too."""
    last = {life.who: life.instance for life in lives}
    listed = {worker.instance for worker in workers} | {record.instance for record in records.values()}
    told = []
    for life in lives:
        over = last[life.who] != life.instance and not life.is_worker
        over |= life.is_worker and bool(workers) and life.instance not in listed
        told.append(replace(life, ended=life.ended or ends.get(life.who, "ended")) if over else life)
    return told


def _own(counters: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in counters.items() if "/" not in name}


def _short(why: str) -> str:
    """How a process ended, without the last line of its log and without a hint why."""
    return why.partition(": ")[0].partition(" (")[0]
