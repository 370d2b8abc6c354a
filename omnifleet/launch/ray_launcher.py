"""Starts processes through Ray: one actor a process, which holds the process's resources on the node that Ray picked.

The same commands as everywhere; only strings and numbers pass through Ray. All nodes need the same environment at the
same path, and the run's folder on a shared file system.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.launch.keeper import GRACE_S
from omnifleet.launch.port import ProcessSpec

try:
    import ray
except ImportError:  # an extra: omnifleet[ray]
    ray = None

log = logging.getLogger("omnifleet.launch")

NODES = "OMNIFLEET_RAY_NODES"
"""Environment variable: nodes to wait for before anything is placed."""
_NODES_DEADLINE_S = 300.0
_PLACED_WITHIN_S = 15.0
_ANSWER_S = 2.0
_OWN_SLOTS = 64
_LOST = -int(signal.SIGKILL)


class RayLauncher:
    """Places processes on a Ray cluster: the one that RAY_ADDRESS names, else a local one that ends with this process.

    Raises INVALID_CONFIG without the ray package, UNAVAILABLE if the cluster cannot be reached or has too few nodes
    (OMNIFLEET_RAY_NODES) within 300 s.
    """

    def __init__(self) -> None:
        if ray is None:
            message = "Ray is not installed: pip install 'omnifleet[ray]'"
            raise OmnifleetError(Reason.INVALID_CONFIG, message, knob="--launcher")
        if not ray.is_initialized():
            _connect()
        wait_for_nodes(int(os.environ.get(NODES, "1")), _NODES_DEADLINE_S)

    def start(self, spec: ProcessSpec) -> RayHandle:
        """Ask Ray for a place; returns once the process runs, or after 15 s while it still waits for free resources.

        Raises UNAVAILABLE if no node could ever hold it, or if the command cannot be started.
        """
        options = actor_options(spec.resources)
        _check_feasible(spec.name, options)
        place = ray.remote(Place).options(name=f"{spec.name}-{time.time_ns()}", **options).remote()
        loopback = len(_alive_nodes()) == 1
        request = json.dumps(
            {"name": spec.name, "command": spec.command, "env": _environment(spec.env), "log": str(spec.log)}
        )
        handle = RayHandle(spec.name, place, place.start.remote(request, loopback))
        handle.wait_placed(_PLACED_WITHIN_S)
        return handle


class RayHandle:
    """A process that an actor holds. `pid` is 0 while Ray looks for a place."""

    def __init__(self, name: str, place: Any, started: Any) -> None:
        self._name = name
        self._place = place
        self._started = started
        self._answer: dict[str, Any] | None = None
        self._asked: Any = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id on its node, 0 before there is one."""
        return int((self._answer or {}).get("pid", 0))

    @property
    def node(self) -> str:
        """Address of the node, "" before there is one."""
        return str((self._answer or {}).get("node", ""))

    def wait_placed(self, deadline_s: float) -> None:
        """Return when the process runs or at the deadline. Raises UNAVAILABLE if it cannot be started."""
        ready, _ = ray.wait([self._started], timeout=deadline_s)
        if not ready or self._answer is not None:
            return
        try:
            self._answer = json.loads(ray.get(self._started))
        except ray.exceptions.RayError as error:
            self._end(_LOST)
            raise retryable(Reason.UNAVAILABLE, f"the place of {self._name} was lost: {error}") from error
        if "error" in self._answer:
            self._end(_LOST)
            raise OmnifleetError(Reason.UNAVAILABLE, str(self._answer["error"]))

    def poll(self) -> int | None:
        """Exit status, None while it runs or waits for a place; -9 if its node or actor was lost."""
        if self._code is None and self._placed():
            self._ask()
        return self._code

    def stop(self, grace_s: float) -> None:
        """SIGTERM, wait, then SIGKILL to all it started; gives the resources back. Harmless if it is gone."""
        if self._code is not None:
            return
        code = _LOST
        if self._placed():
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                code = int(ray.get(self._place.stop.remote(grace_s), timeout=grace_s + _ANSWER_S))
        self._end(code)

    def _placed(self) -> bool:
        if self._answer is None:
            try:
                self.wait_placed(0.0)
            except OmnifleetError as error:
                log.error("%s", error.message)
        return self._answer is not None and self._code is None

    def _ask(self) -> None:
        """One question at a time; a slow node makes the answer late, not the caller."""
        if self._asked is None:
            self._asked = self._place.poll.remote()
        ready, _ = ray.wait([self._asked], timeout=_ANSWER_S)
        if not ready:
            return
        asked, self._asked = self._asked, None
        try:
            code = ray.get(asked)
        except ray.exceptions.RayActorError:
            log.error("%s: its Ray actor was lost", self._name)
            code = _LOST
        if code is not None:
            self._end(int(code))

    def _end(self, code: int) -> None:
        self._code = code
        ray.kill(self._place, no_restart=True)


class Place:
    """The actor: holds the resources of one process and the lifeline of its keeper. If it dies, the process ends."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[str] | None = None
        self._exit: int | None = None
        self._ended = threading.Event()

    def start(self, request_json: str, loopback: bool) -> str:
        """Start the process; {"pid", "node"} or {"error"} as JSON."""
        request = json.loads(request_json)
        node = str(ray.util.get_node_ip_address())
        if not loopback:
            request["command"] = on_node(request["command"], node)
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "omnifleet.launch.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,  # Ray sets the thread count of its own tasks; a service has its own setting
            start_new_session=True,
        )
        self._tell(request)
        answer = self._hear() or {"error": f"{request['name']}: its keeper ended at once"}
        if "pid" in answer:
            answer["node"] = node
            threading.Thread(target=self._listen, daemon=True).start()
        return json.dumps(answer)

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self._exit

    def stop(self, grace_s: float) -> int:
        """End the process; its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._tell({"stop": grace_s})
        self._ended.wait(grace_s + GRACE_S)
        return _LOST if self._exit is None else self._exit

    def _listen(self) -> None:
        answer = self._hear()
        self._exit = int(answer["exit"]) if answer else _LOST
        self._ended.set()

    def _tell(self, words: dict[str, Any]) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps(words) + "\n")
        self._keeper.stdin.flush()

    def _hear(self) -> dict[str, Any] | None:
        assert self._keeper is not None and self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        return dict(json.loads(line)) if line else None


def on_node(command: Sequence[str], address: str) -> list[str]:
    """`… serve …` with its listen addresses on `address` (ports kept, 0 by default), so that other nodes reach it."""
    result = list(command)
    if "serve" not in result:
        return result
    for flag in ("--listen", "--http-listen"):
        if flag in result:
            at = result.index(flag) + 1
            result[at] = f"{address}:{result[at].rpartition(':')[2]}"
        else:
            result += [flag, f"{address}:0"]
    return result


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for a process: "CPU" and "GPU" counts, other names as custom resources; never restarted by Ray."""
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU") and amount}
    return {
        "num_cpus": resources.get("CPU", 1.0),
        "num_gpus": resources.get("GPU", 0.0),
        "resources": custom,
        "max_restarts": 0,
        "max_concurrency": 4,
    }


def wait_for_nodes(count: int, deadline_s: float) -> None:
    """Return once the cluster has `count` live nodes. Raises UNAVAILABLE at the deadline."""
    end = time.monotonic() + deadline_s
    while len(_alive_nodes()) < count:
        if time.monotonic() > end:
            raise retryable(
                Reason.UNAVAILABLE,
                f"the Ray cluster has {len(_alive_nodes())} of {count} nodes after {deadline_s:.0f} s",
                knob=NODES,
            )
        time.sleep(0.2)


def _connect() -> None:
    """Join the cluster of RAY_ADDRESS, or start one here: there, as without Ray, processes share the machine's cores."""
    address = os.environ.get("RAY_ADDRESS", "local")
    own = {"num_cpus": _OWN_SLOTS, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise retryable(Reason.UNAVAILABLE, f"no Ray cluster: {error}", knob="RAY_ADDRESS") from error


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _check_feasible(name: str, options: Mapping[str, Any]) -> None:
    wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    for node in _alive_nodes():
        if all(node["Resources"].get(key, 0.0) >= amount for key, amount in wanted.items()):
            return
    shown = ", ".join(f"{amount:g} {key}" for key, amount in wanted.items() if amount)
    raise OmnifleetError(
        Reason.UNAVAILABLE, f"no node of the Ray cluster can hold {name} ({shown})", knob="--launcher"
    )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """What the process needs beyond its node's environment: our import path and settings, then the spec's own."""
    ours = {key: value for key, value in os.environ.items() if key.startswith("OMNIFLEET_")}
    path = os.environ.get("PYTHONPATH")
    return {**ours, **({"PYTHONPATH": path} if path else {}), **env}
