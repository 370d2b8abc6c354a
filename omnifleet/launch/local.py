"""Processes on this machine. Each leads its own process group, so that nothing it started outlives it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.gpus import HostGpus
from omnifleet.launch.port import ProcessSpec

_POLL_S = 0.02
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; kept by exec
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the command, bound to its parent's life. In a program of its own and not between fork and exec: Python code
there runs the fork handlers of libraries, and gRPC's abort where other threads are inside it."""


class LocalHandle:
    """A child process and its group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._swept = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._sweep()
        return code

    def stop(self, grace_s: float) -> None:
        """SIGTERM, wait, then SIGKILL to the group. Harmless if it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._sweep()

    def _sweep(self) -> None:
        """End what the leader left behind (engine processes of a killed worker)."""
        if not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class LocalLauncher:
    """Starts processes on this machine. gpus: who may see which; without it all see all that this process sees."""

    def __init__(self, gpus: HostGpus | None = None) -> None:
        self._gpus = gpus

    def start(self, spec: ProcessSpec) -> LocalHandle:
        """Start `spec`, output into its log. Raises UNAVAILABLE if the command cannot be started, or finds no free GPU."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        seen = self._gpus.choose(spec) if self._gpus else ()
        env = {**os.environ, **(self._gpus.environment(seen) if self._gpus else {}), **spec.env}
        if shutil.which(spec.command[0], path=env.get("PATH")) is None:
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"cannot start {spec.name}: no command {spec.command[0]}"
            )
        bound = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *spec.command]
        try:
            with spec.log.open("ab") as log:
                process = subprocess.Popen(
                    bound,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise OmnifleetError(Reason.UNAVAILABLE, f"cannot start {spec.name}: {error}") from error
        handle = LocalHandle(process)
        if self._gpus:
            self._gpus.hold(spec, seen, handle)
        return handle


def wait_gone(pid: int, deadline_s: float) -> bool:
    """True once no process `pid` lives; False at the deadline."""
    from omnifleet.service import process_lives

    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if not process_lives(pid):
            return True
        time.sleep(_POLL_S)
    return not process_lives(pid)
