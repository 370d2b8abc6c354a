"""The shell around every service process: run folder, settings, tokens, peers, signals, ready record.

A run folder holds recipe.yaml (resolved), tokens.json, services/NAME.json (who listens where), logs/.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from omnifleet.auth import Tokens
from omnifleet.config.base import StrictModel, config_error
from omnifleet.config.load import apply_overrides
from omnifleet.errors import OmnifleetError, Reason, retryable, room_for
from omnifleet.wire.server import INSTANCE

Section = TypeVar("Section", bound=StrictModel)
_POLL_S = 0.05
TYPED_EXIT = 2
"""Exit status after one clear line: starting the process again cannot help."""
PASSING_EXIT = 75
"""Exit status after one clear line where starting it again may help (EX_TEMPFAIL of sysexits.h)."""
_HOST = socket.gethostname()


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """Who listens where. Addresses are "host:port", "" if the service has none."""

    name: str
    pid: int
    grpc: str
    http: str
    instance: str
    started_unix: float
    host: str = ""
    """Node or container of the process: a pid means something there only."""


def load_tokens(run_dir: Path, tokens_file: Path | None = None) -> Tokens:
    """The run's tokens; made on first use."""
    path = tokens_file or run_dir / "tokens.json"
    if tokens_file is None and not path.exists():
        Tokens.generate().save(path)
    return Tokens.load(path)


def load_section(run_dir: Path, key: str, model: type[Section], overrides: Sequence[str] = ()) -> Section:
    """Section `key` of the run's recipe.yaml (defaults where there is none), with overrides `key.field=value`."""
    path = run_dir / "recipe.yaml"
    body = yaml.safe_load(path.read_text()) if path.exists() else {}
    body = apply_overrides(body or {}, overrides)
    try:
        return model.model_validate(body.get(key) or {})
    except ValidationError as error:
        raise config_error(error, model, f"{path} [{key}]") from None


def write_record(run_dir: Path, name: str, *, grpc: str, http: str = "") -> ServiceRecord:
    """Say that service `name` is ready (atomic)."""
    record = ServiceRecord(name, os.getpid(), grpc, http, INSTANCE, time.time(), _HOST)
    path = run_dir / "services" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(asdict(record)))
    scratch.replace(path)
    return record


def read_records(run_dir: Path) -> dict[str, ServiceRecord]:
    """All records of a run whose process lives; one of another host counts until its supervisor takes it away."""
    records = {}
    for path in sorted((run_dir / "services").glob("[!.]*.json")):
        try:
            record = ServiceRecord(**json.loads(path.read_text()))
        except (ValueError, TypeError, FileNotFoundError):
            continue  # replaced while we read: the next look finds it
        if record.host not in ("", _HOST) or process_lives(record.pid):
            records[record.name] = record
    return records


def process_lives(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


async def peer(run_dir: Path, name: str, *, given: str = "", deadline_s: float = 60.0) -> str:
    """gRPC address of a peer: `given`, or what its record says once it is up. Raises UNAVAILABLE at the deadline."""
    if given:
        return given
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        record = read_records(run_dir).get(name)
        if record is not None:
            return record.grpc
        await asyncio.sleep(_POLL_S)
    raise retryable(Reason.UNAVAILABLE, f"{name} did not come up in {run_dir} within {deadline_s:.0f} s")


async def until_stopped() -> None:
    """Return at the first SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def freeze_heap() -> None:
    """Take what is loaded by now out of the garbage collector's rounds: it stays for the life of the process.

    Libraries leave hundreds of thousands of objects, and each full round looks at all of them while requests wait.
    """
    gc.collect()
    gc.freeze()


def run_to_exit(
    main: Any,
    *,
    passing_exit: int = TYPED_EXIT,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a service coroutine; an OmnifleetError ends the process with one clear line and status 2.

    passing_exit: the status for an error that is retryable, where the service wants to be started again.
    loop_factory: the event loop, asyncio's own by default.
    """
    try:
        with room_for("run.root"), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main)
    except OmnifleetError as error:
        print(f"omnifleet: {error}", file=sys.stderr, flush=True)
        raise SystemExit(passing_exit if error.retryable else TYPED_EXIT) from None
