"""The local launcher and the run folder: nothing outlives its leader, records tell who listens where."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from omnifleet.cli.run import _wait_ready
from omnifleet.cli.watch import _watch
from omnifleet.client.fleet import FleetView
from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.local import LocalLauncher, wait_gone
from omnifleet.launch.plan import prepare_run, service_spec, worker_spec
from omnifleet.launch.port import Handle, ProcessSpec
from omnifleet.launch.supervisor import (
    _keep_addresses,
    _next_worker_number,
    last_line,
    read_wanted,
    want,
)
from omnifleet.service import load_section, process_lives, read_records, write_record
from tests.unit.small_run import small_recipe, supervisor_of

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def spec(tmp_path: Path, code: str) -> ProcessSpec:
    return ProcessSpec("p", [sys.executable, "-c", code], {}, tmp_path / "p.log")


def first_line(path: Path, deadline_s: float = 20.0) -> str:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if path.exists() and "\n" in path.read_text():
            return path.read_text().splitlines()[0]
        time.sleep(0.02)
    raise AssertionError(f"{path} said nothing")


def test_a_killed_leader_leaves_no_child(tmp_path: Path) -> None:
    handle = LocalLauncher().start(spec(tmp_path, PARENT))
    child = int(first_line(tmp_path / "p.log"))
    os.kill(handle.pid, signal.SIGKILL)
    assert wait_gone(handle.pid, 10)
    assert handle.poll() == -signal.SIGKILL
    assert wait_gone(child, 10)


def test_stop_takes_the_group_and_is_harmless_twice(tmp_path: Path) -> None:
    handle = LocalLauncher().start(spec(tmp_path, PARENT))
    child = int(first_line(tmp_path / "p.log"))
    handle.stop(5)
    handle.stop(5)
    assert not process_lives(handle.pid) and wait_gone(child, 10)


def test_a_deaf_process_is_ended_by_force(tmp_path: Path) -> None:
    handle = LocalLauncher().start(spec(tmp_path, DEAF))
    first_line(tmp_path / "p.log")
    handle.stop(0.2)
    assert handle.poll() == -signal.SIGKILL


def test_children_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from omnifleet.launch.local import LocalLauncher;"
        "from omnifleet.launch.port import Handle, ProcessSpec;"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        f"h = LocalLauncher().start(ProcessSpec('p', sleeper, {{}}, Path({str(tmp_path)!r}) / 'c.log'));"
        "print(h.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        launcher.kill()
    assert wait_gone(child, 10)


def test_a_missing_command_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(OmnifleetError, match="cannot start p"):
        LocalLauncher().start(ProcessSpec("p", ["/no/such/program"], {}, tmp_path / "p.log"))


def test_records_of_dead_processes_do_not_count(tmp_path: Path) -> None:
    write_record(tmp_path, "media", grpc="127.0.0.1:1")
    assert read_records(tmp_path)["media"].pid == os.getpid()
    path = tmp_path / "services" / "media.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "pid": 2**22 - 3}))
    assert read_records(tmp_path) == {}


def test_a_restarted_service_keeps_its_addresses(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / ".media.last.json").write_text('{"grpc": "127.0.0.1:7", "http": "127.0.0.1:8"}')
    command = _keep_addresses(tmp_path, service_spec(tmp_path, "media")).command
    assert command[-4:] == ["--listen", "127.0.0.1:7", "--http-listen", "127.0.0.1:8"]


def test_worker_names_are_never_used_twice(tmp_path: Path) -> None:
    assert _next_worker_number(tmp_path) == 0
    (tmp_path / "logs").mkdir()
    for number in (0, 11):
        (tmp_path / "logs" / f"worker-{number}.log").touch()
    assert _next_worker_number(tmp_path) == 12


def test_wishes_add_up(tmp_path: Path) -> None:
    want(tmp_path, train=True)
    want(tmp_path, other=True)
    assert read_wanted(tmp_path) == {"train": True, "other": True}


def test_last_line_says_something(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_line(log) == "no log"
    log.write_text("one\ntwo\n\n")
    assert last_line(log) == "two"


def test_a_run_folder_gives_services_their_section(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, media={"decoders": 2})
    run_dir = prepare_run(recipe)
    assert load_section(run_dir, "media", MediaConfig).decoders == 2
    assert load_section(run_dir, "media", MediaConfig, ["media.decoders=3"]).decoders == 3
    with pytest.raises(OmnifleetError, match="did you mean 'decoders'"):
        load_section(run_dir, "media", MediaConfig, ["media.decoder=3"])
    assert worker_spec(run_dir, recipe, "worker-0").command[-4:] == ["--name", "worker-0", "--engine", "vllm"]


def test_waiting_for_services_ends_with_their_supervisor(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "supervisor.log").write_text("starting\nno such thing\n")
    with pytest.raises(OmnifleetError, match="ended: no such thing"):
        _wait_ready(tmp_path, 1, lambda: False, deadline_s=20)


def test_watching_a_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "supervisor.log").write_text("out of memory\n")
    trainer = {"name": "trainer", "pid": 1, "state": "running"}
    state = {"pid": 2**22 + 1, "state": "running", "failure": "", "processes": [trainer]}
    (tmp_path / "supervisor.json").write_text(json.dumps(state))
    with pytest.raises(OmnifleetError, match="ended: out of memory"):
        _watch(tmp_path, lambda rows: None, lambda: None)


class Nowhere:
    """A launcher that has no place left."""

    def start(self, spec: ProcessSpec) -> Handle:
        raise OmnifleetError(Reason.UNAVAILABLE, f"no place for {spec.name}", retryable=True)


class TwoWanted:
    """A fleet of nobody that wants two."""

    async def scale(self, desired: int, reason: str) -> None:
        pass

    async def list(self, *, include_gone: bool) -> FleetView:
        return FleetView([], 2, None, 0)


async def test_a_worker_that_finds_no_place_does_not_end_the_supervisor(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, Nowhere(), TwoWanted())
    await supervisor._follow_fleet()
    assert not supervisor._workers and not supervisor.failure
    assert supervisor._worker_retry_at > time.monotonic()


async def test_processes_start_whole_while_grpc_is_busy_in_other_threads(tmp_path: Path) -> None:
    """Between fork and exec gRPC's fork handlers abort half of them: a worker was then gone without a word."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    done = asyncio.Event()

    async def call() -> None:
        while not done.is_set():
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with contextlib.suppress(grpc.RpcError):
                    await channel.unary_unary("/none/none")(b"", timeout=0.05)

    calls = [asyncio.create_task(call()) for _ in range(4)]
    handles = []
    for number in range(40):
        handles.append(LocalLauncher().start(ProcessSpec(f"p{number}", ["/bin/true"], {}, tmp_path / "log")))
        await asyncio.sleep(0)
    codes = [await asyncio.to_thread(handle._process.wait, 60) for handle in handles]
    done.set()
    await asyncio.gather(*calls)
    await server.stop(None)
    assert codes == [0] * 40, (tmp_path / "log").read_text()[:2000]
