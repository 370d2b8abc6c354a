"""Processes placed by a real, local Ray: started, watched, stopped; nothing is left behind, however the actor dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.port import ProcessSpec
from omnifleet.launch.ray_launcher import RayHandle, RayLauncher, actor_options, on_node, wait_for_nodes
from omnifleet.service import process_lives, read_records

FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, os.environ.get("GREETING"), os.environ.get("OMP_NUM_THREADS"), flush=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[RayLauncher]:
    """A launcher on a Ray of its own, two CPUs."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield RayLauncher()
    finally:
        ray.shutdown()


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def python(tmp_path: Path, source: str, *arguments: str, **resources: float) -> ProcessSpec:
    command = [sys.executable, "-c", source, *arguments]
    return ProcessSpec(
        "job", command, {"GREETING": "hello"}, tmp_path / "logs" / "job.log", resources or {"CPU": 1}
    )


def family(handle: RayHandle, spec: ProcessSpec) -> list[int]:
    """Process ids of the job and of its child, once both are up."""
    wait_until(lambda: spec.log.exists() and "up" in spec.log.read_text())
    words = spec.log.read_text().split()
    assert words[2:4] == ["hello", "None"]
    return [handle.pid, int(words[1])]


def gone(pids: list[int]) -> bool:
    return not any(process_lives(pid) for pid in pids)


def exit_status(handle: RayHandle) -> int | None:
    wait_until(lambda: handle.poll() is not None)
    return handle.poll()


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_a_command_runs_logs_and_is_stopped(launcher: RayLauncher, tmp_path: Path) -> None:
    spec = python(tmp_path, FAMILY)
    handle = launcher.start(spec)
    pids = family(handle, spec)
    assert handle.poll() is None and all(process_lives(pid) for pid in pids)
    handle.stop(5.0)
    assert handle.poll() == -signal.SIGTERM
    wait_until(lambda: gone(pids))
    handle.stop(5.0)  # harmless
    wait_until(lambda: free_cpus() == 2.0)


def test_one_that_ignores_sigterm_is_killed_with_all_it_started(
    launcher: RayLauncher, tmp_path: Path
) -> None:
    spec = python(tmp_path, FAMILY, "stubborn")
    handle = launcher.start(spec)
    pids = family(handle, spec)
    handle.stop(0.3)
    assert handle.poll() == -signal.SIGKILL
    wait_until(lambda: gone(pids))


def test_exit_statuses_are_told_and_resources_given_back(launcher: RayLauncher, tmp_path: Path) -> None:
    for status in (0, 2):
        handle = launcher.start(python(tmp_path, f"raise SystemExit({status})"))
        assert exit_status(handle) == status
    handle = launcher.start(python(tmp_path, FAMILY))
    os.kill(handle.pid, signal.SIGKILL)
    assert exit_status(handle) == -signal.SIGKILL
    wait_until(lambda: free_cpus() == 2.0)


@pytest.mark.parametrize("kill", ["ray.kill", "kill -9"])
def test_the_process_ends_with_its_actor(launcher: RayLauncher, tmp_path: Path, kill: str) -> None:
    spec = python(tmp_path, FAMILY)
    handle = launcher.start(spec)
    pids = family(handle, spec)
    if kill == "ray.kill":
        ray.kill(handle._place)
    else:
        os.kill(actor_pid(handle), signal.SIGKILL)
    assert exit_status(handle) == -signal.SIGKILL
    wait_until(lambda: gone(pids))
    handle.stop(1.0)  # harmless


def actor_pid(handle: RayHandle) -> int:
    """The Ray worker process that runs the actor: the one that holds the other end of the keeper's pipe."""
    return int(ray.get(handle._place.__ray_call__.remote(lambda place: os.getpid())))


def test_one_waits_for_free_resources(
    launcher: RayLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnifleet.launch.ray_launcher._PLACED_WITHIN_S", 0.5)
    first = launcher.start(python(tmp_path, FAMILY, CPU=2))
    wait_until(lambda: first.poll() is None and first.pid > 0)
    second = launcher.start(python(tmp_path, "raise SystemExit(3)", CPU=1))
    third = launcher.start(python(tmp_path, FAMILY, CPU=1))
    assert second.pid == 0 and second.poll() is None
    third.stop(1.0)  # it never had a place
    assert third.poll() == -signal.SIGKILL
    first.stop(5.0)
    assert exit_status(second) == 3


def test_what_cannot_be_started_is_said_at_once(launcher: RayLauncher, tmp_path: Path) -> None:
    with pytest.raises(OmnifleetError) as never:
        launcher.start(python(tmp_path, "pass", GPU=1))
    assert never.value.reason is Reason.UNAVAILABLE and "1 GPU" in never.value.message
    missing = ProcessSpec("job", [str(tmp_path / "missing")], {}, tmp_path / "job.log", {"CPU": 1})
    with pytest.raises(OmnifleetError) as absent:
        launcher.start(missing)
    assert "cannot start job" in absent.value.message
    with pytest.raises(OmnifleetError) as few:
        wait_for_nodes(2, 0.0)
    assert few.value.knob == "OMNIFLEET_RAY_NODES"


def test_services_of_many_nodes_listen_on_their_node() -> None:
    command = ["omnifleet", "reward", "serve", "--run-dir", "/r"]
    assert on_node(command, "10.0.0.7") == [*command, "--listen", "10.0.0.7:0", "--http-listen", "10.0.0.7:0"]
    again = [*command, "--listen", "10.0.0.1:9", "--http-listen", "10.0.0.1:8"]
    assert on_node(again, "10.0.0.7")[5:] == ["--listen", "10.0.0.7:9", "--http-listen", "10.0.0.7:8"]
    assert on_node(["nvidia-smi"], "10.0.0.7") == ["nvidia-smi"]


def test_resources_become_actor_options() -> None:
    options = actor_options({"CPU": 2, "GPU": 1, "nvlink": 1})
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (2, 1, {"nvlink": 1})
    assert actor_options({})["num_cpus"] == 1.0


@pytest.mark.heavy
def test_a_run_comes_up_and_goes_down_through_ray(tmp_path: Path) -> None:
    def omnifleet(*arguments: str) -> None:
        command = [sys.executable, "-m", "omnifleet", *arguments]
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr

    run = tmp_path / "runs" / "placed"
    model = tmp_path / "model"
    settings = ["run.name=placed", f"model.path={model}", "rollout.workers=1"]
    omnifleet("tiny-model", "--no-warm-start", "--out", str(model))
    omnifleet("up", "cpu-tiny", *settings, "--engine", "fake", "--launcher", "ray")
    try:
        pids = {name: record.pid for name, record in read_records(run).items()}
        assert set(pids) == {"media", "reward", "gateway", "worker-0"}
        ours = {name: Path(f"/proc/{pid}/environ").read_text() for name, pid in pids.items()}
        assert all("RAY_JOB_ID=" in environment for environment in ours.values())
    finally:
        omnifleet("down", "--run", "placed")
    wait_until(lambda: gone(list(pids.values())))
