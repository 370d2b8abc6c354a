"""What the rollout benches share: a load, an engine with everything around it, and whose CPU was used.

The engine's front and its worker live in the bench's own process, so that the same engine can be asked directly; media service,
gateway and the clients that ask through it are processes.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from omnifleet.auth import Scope
from omnifleet.config.services import RolloutConfig
from omnifleet.service import freeze_heap, load_section, load_tokens, peer, read_records
from omnifleet.types import Identity
from omnifleet_rollout.engine.vllm_engine import VllmEngine
from omnifleet_rollout.worker.command import Worker

WHO = Identity("bench")
READY_S = 120.0
_MARKS = {"gateway_app": "gateway", "omnifleet_media": "media", "clients.py": "client"}
"""Of a child's command line: what it is."""

Ask = Callable[[int, int], Awaitable[int]]
"""(number of the request, tokens) -> tokens made."""


@dataclass(frozen=True, slots=True)
class Load:
    """requests at once, in all, and tokens of each reply."""

    at_once: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of each request, in order of their ends; wall: seconds of all. cpu: seconds of CPU that the asking process used."""

    seconds: list[float]
    wall: float
    cpu: float

    @property
    def p50_ms(self) -> float:
        """Median of the requests, milliseconds."""
        return 1000 * statistics.median(self.seconds)


async def drive(load: Load, ask: Ask) -> Round:
    """Run a load; every request must give all its tokens."""
    room, seconds = asyncio.Semaphore(load.at_once), list[float]()

    async def one(number: int) -> None:
        async with room:
            began = time.perf_counter()
            made = await ask(number, load.tokens)
            assert made == load.tokens, f"{made} of {load.tokens} tokens"
            seconds.append(time.perf_counter() - began)

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(load.requests)))
    return Round(seconds, time.perf_counter() - began, time.process_time() - used)


@asynccontextmanager
async def stack(
    run_dir: Path, model: Path, engine_settings: Mapping[str, Any], **sections: Any
) -> AsyncIterator[VllmEngine]:
    """Media service and gateway as processes, a worker in this one; yields its engine. sections: more of the recipe."""
    recipe = {"model": {"path": str(model)}, "rollout": {"engine": dict(engine_settings)}, **sections}
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    tokens = load_tokens(run_dir)
    config = load_section(run_dir, "rollout", RolloutConfig, ())
    secret = tokens.secret(Scope.SERVICE)
    engine = VllmEngine(model, config, find_media=lambda: peer(run_dir, "media"), secret=secret)
    processes, serving = [], None
    try:
        await engine.start()  # first: the engine's process may be forked from ours
        freeze_heap()  # as a worker's own process does
        for app in ("omnifleet_media:app", "omnifleet_rollout:gateway_app"):
            module, _, attribute = app.partition(":")
            code = f"from {module}.cli import {attribute}; {attribute}()"
            command = [sys.executable, "-c", code, "serve", "--run-dir", str(run_dir)]
            processes.append(await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL))
        worker = Worker(engine, "worker-0", config, tokens)
        serving = asyncio.create_task(
            worker.serve(run_dir, listen="127.0.0.1:0", http_listen="127.0.0.1:0", gateway="")
        )
        for name in ("media", "gateway"):
            await peer(run_dir, name)
        await _ready(run_dir)
        yield engine
    finally:
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        for process in processes:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))
        await engine.shutdown()


async def _ready(run_dir: Path) -> None:
    """Wait until the gateway would find a worker."""
    record = read_records(run_dir)["gateway"]
    async with httpx.AsyncClient(base_url=f"http://{record.http}") as http, asyncio.timeout(READY_S):
        while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def output_of(*command: str) -> bytes:
    """The last line that a process prints. AssertionError unless it ends with 0."""
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return out.splitlines()[-1]


def processes_cpu() -> dict[str, float]:
    """Seconds of CPU so far: this process (the engine's front and its worker), and its children by what they are."""
    own = psutil.Process()
    seconds = {"front and worker": _cpu(own)}
    for child in own.children(recursive=True):
        line = " ".join(child.cmdline())
        name = next((name for mark, name in _MARKS.items() if mark in line), "engine")
        seconds[name] = seconds.get(name, 0.0) + _cpu(child)
    return seconds


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
