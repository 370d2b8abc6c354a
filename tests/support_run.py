"""A run driven by the command line in a scratch folder, for tests that want real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnifleet.report.records import read_run
from omnifleet.service import process_lives, read_records

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "cpu-tiny.yaml"


def until(condition: Callable[[], Any], deadline_s: float, what: str | Callable[[], str]) -> Any:
    """Wait for an event that has no file descriptor: poll quickly, fail loudly (`what` is asked at the end)."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline_s} s: {what() if callable(what) else what}")


class CliRun:
    """`omnifleet train` as a child process, and what one would type beside it."""

    def __init__(
        self, folder: Path, overrides: list[str], *, engine: str = "fake", recipe: str = str(RECIPE)
    ) -> None:
        self.folder, self.recipe = folder, recipe
        self.overrides = overrides
        self.engine = engine
        self.process: subprocess.Popen[str] | None = None
        self.said = ""

    @property
    def run_dir(self) -> Path:
        return next((self.folder / "runs").iterdir())

    def omnifleet(self, *arguments: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "omnifleet", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=180, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def train(self, *more: str) -> None:
        command = [sys.executable, "-m", "omnifleet", "train", self.recipe, *self.overrides, *more]
        command += ["--engine", self.engine]
        self.process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, deadline_s: float) -> int:
        assert self.process is not None
        try:
            out, _ = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"training did not end; logs:\n{self.logs()}") from None
        self.said = out
        if self.process.returncode not in (0, 130):
            raise AssertionError(f"train ended with {self.process.returncode}:\n{out}\n{self.logs()}")
        return self.process.returncode

    def to_the_end(self, deadline_s: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Train; its summary and steps. Whatever happens, nothing of it is left."""
        try:
            self.train()
            assert self.finish(deadline_s) == 0
            return self.summary(), read_run(self.run_dir).steps
        finally:
            self.close()

    def step(self) -> int:
        try:
            steps = read_run(self.run_dir).steps
        except (StopIteration, FileNotFoundError):
            return -1
        return int(steps[-1]["step"]) if steps else -1

    def wait_step(self, step: int, deadline_s: float = 120.0) -> None:
        def reached() -> bool:
            if self.process is not None and self.process.poll() is not None and self.step() < step:
                raise AssertionError(f"training ended at step {self.step()}:\n{self.logs()}")
            return self.step() >= step

        until(reached, deadline_s, lambda: f"step {step} (at {self.step()})\n{self.logs()}")

    def pid(self, service: str) -> int:
        return until(
            lambda: read_records(self.run_dir).get(service), 60, lambda: f"{service} is up\n{self.logs()}"
        ).pid

    def kill(self, service: str) -> None:
        os.kill(self.pid(service), signal.SIGKILL)

    def workers(self) -> list[dict[str, Any]]:
        return self.status()["workers"]

    def status(self) -> dict[str, Any]:
        out = self.omnifleet("status", "--json")
        return json.loads(out[out.index("{") :])

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def logs(self) -> str:
        try:
            files = sorted((self.run_dir / "logs").glob("*.log"))
        except (StopIteration, FileNotFoundError):
            return "no run folder"
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-8:]) for file in files
        )

    def pids(self) -> list[int]:
        state = json.loads((self.run_dir / "supervisor.json").read_text())
        return [state["pid"], *(p["pid"] for p in state["processes"])]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if (self.folder / "runs").exists():
            pids = self.pids() if (self.run_dir / "supervisor.json").exists() else []
            self.omnifleet("down", check=False)
            left = [pid for pid in pids if process_lives(pid)]
            assert not left, f"orphans: {left}"
