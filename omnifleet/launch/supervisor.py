"""Keeps the processes of one run alive: starts them in order, restarts what dies, follows the fleet's desired size.

State is in the run's folder: supervisor.json (for `omnifleet status`), wanted.json (what the operator asked for).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError
from omnifleet.launch.plan import (
    ORDER,
    follower_specs,
    newest_weights,
    service_spec,
    trainer_gpus,
    worker_spec,
)
from omnifleet.launch.port import Handle, Launcher, ProcessSpec
from omnifleet.service import TYPED_EXIT, load_tokens, read_records
from omnifleet.types import WorkerState

log = logging.getLogger("omnifleet.supervisor")

_TICK_S = 0.2
_STOP_GRACE_S = 15.0
_QUICK_DEATH_S = 20.0
_GIVE_UP_AFTER = 3
_START_PAUSE_S = 5.0
_HANGING_GRACE_S = 1.0
_ENDS_KEPT = 20


@dataclass
class Watched:
    """One process and its history. `quick_deaths` counts deaths in a row soon after a start.

    doomed_at: when the registry was first seen to hold this worker for dead, though its process lives.
    """

    spec: ProcessSpec
    handle: Handle
    started: float = field(default_factory=time.monotonic)
    restarts: int = 0
    quick_deaths: int = 0
    state: str = "running"
    exit: int | None = None
    retry_at: float = 0.0
    doomed_at: float | None = None


class Supervisor:
    """Runs until stopped. `engine` is passed to workers ("vllm", or "fake" in tests of everything around it)."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        launcher: Launcher,
        *,
        as_json: bool = False,
        engine: str = "vllm",
    ) -> None:
        self._run_dir = run_dir
        self._recipe = recipe
        self._launcher = launcher
        self._as_json = as_json
        self._engine = engine
        self._services: dict[str, Watched] = {}
        self._workers: dict[str, Watched] = {}
        self._next_worker = _next_worker_number(run_dir)
        self._worker_quick_deaths = 0
        self._worker_retry_at = 0.0
        self._ends: deque[dict[str, Any]] = deque(maxlen=_ENDS_KEPT)
        self._fleet: FleetClient | None = None
        self._closing = contextlib.AsyncExitStack()
        self._scaled = False
        self.failure = ""

    async def run(self, stopped: asyncio.Event) -> None:
        """Start everything, tend it until `stopped`, then stop everything in reverse order."""
        try:
            for name in ORDER:
                self._services[name] = self._start_service(name)
            while not stopped.is_set():
                await self._tick()
                self._write_state("running" if not self.failure else "failed")
                try:
                    await asyncio.wait_for(stopped.wait(), _TICK_S)
                except TimeoutError:
                    continue
        finally:
            await self._stop_all()

    async def _tick(self) -> None:
        self._follow_trainer()
        for watched in self._services.values():
            self._tend(watched)
        await self._follow_fleet()

    def _start_service(self, name: str) -> Watched:
        """A service's first start. The gateway's begins a new life of the run; its restarts go on with the old one."""
        spec = service_spec(self._run_dir, name, as_json=self._as_json)
        first = replace(spec, command=[*spec.command, "--new-life"]) if name == "gateway" else spec
        return replace(self._start(first), spec=spec)

    def _start(self, spec: ProcessSpec) -> Watched:
        _drop_record(self._run_dir, spec.name)
        handle = self._launcher.start(spec)
        log.info("started %s (pid %d)", spec.name, handle.pid)
        return Watched(spec, handle)

    def _tend(self, watched: Watched) -> None:
        """Restart a service that died, with growing pauses; give up on one that cannot live."""
        if watched.state in ("failed", "done"):
            return
        now = time.monotonic()
        if watched.state == "waiting":
            if now >= watched.retry_at:
                try:
                    self._restart(watched)
                except OmnifleetError as error:
                    watched.retry_at = now + _START_PAUSE_S
                    log.warning("%s; again in %.0f s", error, _START_PAUSE_S)
            return
        code = watched.handle.poll()
        if code is None:
            return
        watched.exit = code
        if watched.spec.name == "trainer" and code == 0:
            watched.state = "done"
            return
        watched.quick_deaths = watched.quick_deaths + 1 if now - watched.started < _QUICK_DEATH_S else 1
        if code == TYPED_EXIT or watched.quick_deaths >= _GIVE_UP_AFTER:
            watched.state = "failed"
            self._fail(watched.spec, code)
            return
        watched.state = "waiting"
        watched.retry_at = now + 0.5 * 2 ** (watched.quick_deaths - 1)
        log.warning("%s, starting it again", self._note_end(watched, code))

    def _restart(self, watched: Watched) -> None:
        _drop_record(self._run_dir, watched.spec.name)
        fresh = self._start(_keep_addresses(self._run_dir, watched.spec))
        watched.handle, watched.started, watched.state = fresh.handle, fresh.started, "running"
        watched.restarts += 1

    def _fail(self, spec: ProcessSpec, code: int) -> None:
        self.failure = f"{spec.name} {why_ended(code)}: {last_line(spec.log)}"
        log.error("%s", self.failure)

    def _note_end(self, watched: Watched, code: int) -> str:
        """Keep for `omnifleet status` that a process ended, and why; the same in one line."""
        name, why = watched.spec.name, f"{why_ended(code)}: {last_line(watched.spec.log)}"
        self._ends.append(
            {"name": name, "pid": watched.handle.pid, "exit": code, "why": why, "unix": time.time()}
        )
        return f"{name} (pid {watched.handle.pid}) {why}"

    def _follow_trainer(self) -> None:
        wanted = bool(read_wanted(self._run_dir).get("train"))
        trainer = self._services.get("trainer")
        if wanted and trainer is None and len(read_records(self._run_dir)) >= len(ORDER):
            self._services["trainer"] = self._start(
                service_spec(self._run_dir, "trainer", as_json=self._as_json, gpus=trainer_gpus(self._recipe))
            )
            for spec in follower_specs(self._run_dir, self._recipe, as_json=self._as_json):
                self._services[spec.name] = self._start(spec)
        elif not wanted and trainer is not None:
            for watched in self._pop_policy():
                watched.handle.stop(_STOP_GRACE_S)

    async def _follow_fleet(self) -> None:
        """Start workers until as many live as the registry desires; draining ones leave by themselves."""
        self._bury_workers()
        record = read_records(self._run_dir).get("gateway")
        if record is None:
            return
        try:
            fleet = await self._open_fleet(record.grpc)
            if not self._scaled:
                await fleet.scale(self._recipe.rollout.workers, reason="start")
                self._scaled = True
            view = await fleet.list(include_gone=True)
        except OmnifleetError as error:
            log.debug("fleet not reachable: %s", error)
            return
        leaving = [w.id for w in view.workers if w.state is WorkerState.DRAINING or w.state.gone]
        serving = [name for name in self._workers if not any(id.startswith(f"{name}-") for id in leaving)]
        await self._end_doomed([w.id for w in view.workers if w.state is WorkerState.DEAD])
        missing = min(view.desired, self._recipe.rollout.max_workers) - len(serving)
        if time.monotonic() < self._worker_retry_at or self._worker_quick_deaths >= _GIVE_UP_AFTER:
            return
        for _ in range(missing):
            name = f"worker-{self._next_worker}"
            self._next_worker += 1
            spec = worker_spec(
                self._run_dir,
                self._recipe,
                name,
                as_json=self._as_json,
                engine=self._engine,
                model=self._weights_to_serve(),
            )
            try:
                self._workers[name] = self._start(spec)
            except OmnifleetError as error:
                self._worker_retry_at = time.monotonic() + _START_PAUSE_S
                log.warning("%s cannot be started: %s; again in %.0f s", name, error, _START_PAUSE_S)
                return

    async def _end_doomed(self, dead: Sequence[str]) -> None:
        """A worker that the registry gave up learns it from its next heartbeat and leaves; one that hangs is ended."""
        now = time.monotonic()
        for name, watched in self._workers.items():
            if not any(id.startswith(f"{name}-") for id in dead):
                continue
            watched.doomed_at = watched.doomed_at or now
            if now - watched.doomed_at > _STOP_GRACE_S:
                log.warning(
                    "%s hangs: the registry gave it up and its process does not end; killing it", name
                )
                await asyncio.to_thread(watched.handle.stop, _HANGING_GRACE_S)

    def _weights_to_serve(self) -> Path | None:
        """Without a trainer, what the run has learned; a trainer brings its weights itself."""
        return None if read_wanted(self._run_dir).get("train") else newest_weights(self._run_dir)

    async def _open_fleet(self, address: str) -> FleetClient:
        if self._fleet is None:
            secret = load_tokens(self._run_dir, self._recipe.auth.tokens_file).secret(Scope.SERVICE)
            self._fleet = await self._closing.enter_async_context(FleetClient.open(address, secret))
        return self._fleet

    def _bury_workers(self) -> None:
        now = time.monotonic()
        for name, watched in list(self._workers.items()):
            code = watched.handle.poll()
            if code is None:
                if now - watched.started > _QUICK_DEATH_S:
                    self._worker_quick_deaths = 0
                continue
            del self._workers[name]
            _drop_record(self._run_dir, name)
            end = self._note_end(watched, code)
            if code == 0:
                log.info("%s", end)
                continue
            log.warning("%s", end)
            quick = now - watched.started < _QUICK_DEATH_S
            self._worker_quick_deaths = self._worker_quick_deaths + 1 if quick else 1
            self._worker_retry_at = now + 0.5 * 2 ** (self._worker_quick_deaths - 1)
            if code == TYPED_EXIT or self._worker_quick_deaths >= _GIVE_UP_AFTER:
                self._worker_quick_deaths = _GIVE_UP_AFTER
                self._fail(watched.spec, code)

    async def _stop_all(self) -> None:
        """Trainer first, then workers side by side, then the services in reverse order."""
        order = [[watched] for watched in self._pop_policy()] + [list(self._workers.values())]
        order += [[self._services[name]] for name in reversed(ORDER) if name in self._services]
        for together in order:
            await asyncio.gather(*(asyncio.to_thread(w.handle.stop, _STOP_GRACE_S) for w in together))
            for watched in together:
                _drop_record(self._run_dir, watched.spec.name)
        await self._closing.aclose()
        self._write_state("stopped" if not self.failure else "failed")

    def _pop_policy(self) -> list[Watched]:
        """The trainer, and after it its policy's other nodes."""
        names = [name for name in self._services if name not in ORDER]
        return [self._services.pop(name) for name in names]

    def _write_state(self, state: str) -> None:
        body: dict[str, Any] = {"pid": os.getpid(), "state": state, "failure": self.failure, "processes": []}
        body["ends"] = list(self._ends)
        for watched in [*self._services.values(), *self._workers.values()]:
            body["processes"].append(
                {
                    "name": watched.spec.name,
                    "pid": watched.handle.pid,
                    "state": watched.state,
                    "restarts": watched.restarts,
                    "exit": watched.exit,
                    "since_s": round(time.monotonic() - watched.started, 1),
                }
            )
        _write_json(self._run_dir / "supervisor.json", body)


def why_ended(code: int) -> str:
    """An exit status in words; the status of a process that a signal ended is minus its number."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return "left" if code == 0 else f"ended with status {code}"


def read_state(run_dir: Path) -> dict[str, Any]:
    """What the supervisor last said, {} if it never ran."""
    return _read_json(run_dir / "supervisor.json")


def read_wanted(run_dir: Path) -> dict[str, Any]:
    """What the operator asked the supervisor for."""
    return _read_json(run_dir / "wanted.json")


def want(run_dir: Path, **wishes: bool) -> None:
    """Change what the operator asks for, e.g. `want(run_dir, train=True)`."""
    _write_json(run_dir / "wanted.json", {**read_wanted(run_dir), **wishes})


def last_line(path: Path, limit: int = 400) -> str:
    """The last line of a log that says something."""
    try:
        with path.open("rb") as log_file:
            log_file.seek(max(0, path.stat().st_size - 8192))
            lines = [
                line.strip() for line in log_file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except OSError:
        return "no log"
    return lines[-1][:limit] if lines else "no output"


def _keep_addresses(run_dir: Path, spec: ProcessSpec) -> ProcessSpec:
    """A restarted service listens where it did before: its peers know those addresses."""
    record = _read_json(run_dir / "services" / f".{spec.name}.last.json")
    command = list(spec.command)
    for flag, key in (("--listen", "grpc"), ("--http-listen", "http")):
        if record.get(key) and flag not in command:
            command += [flag, record[key]]
    return ProcessSpec(spec.name, command, spec.env, spec.log, spec.resources)


def _drop_record(run_dir: Path, name: str) -> None:
    path = run_dir / "services" / f"{name}.json"
    if path.exists():
        path.replace(path.with_name(f".{name}.last.json"))


def _next_worker_number(run_dir: Path) -> int:
    """Worker names are never used twice in a run: a dead id never comes back."""
    numbers = [
        int(m[1]) for p in (run_dir / "logs").glob("worker-*.log") if (m := re.match(r"worker-(\d+)", p.name))
    ]
    return max(numbers, default=-1) + 1


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _write_json(path: Path, body: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(body))
    scratch.replace(path)
