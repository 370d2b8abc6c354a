"""Processes on this machine. Each leads its own process group, so that nothing it started outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.port import ProcessSpec

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.02


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
    """Starts processes on this machine."""

    def start(self, spec: ProcessSpec) -> LocalHandle:
        """Start `spec`, output into its log. Raises UNAVAILABLE if the command cannot be started."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with spec.log.open("ab") as log:
                process = subprocess.Popen(
                    spec.command,
                    env={**os.environ, **spec.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
        except OSError as error:
            raise OmnifleetError(Reason.UNAVAILABLE, f"cannot start {spec.name}: {error}") from error
        return LocalHandle(process)


def wait_gone(pid: int, deadline_s: float) -> bool:
    """True once no process `pid` lives; False at the deadline."""
    from omnifleet.service import process_lives

    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if not process_lives(pid):
            return True
        time.sleep(_POLL_S)
    return not process_lives(pid)
