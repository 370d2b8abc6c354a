"""Fixtures that many rooms share: a tiny random checkpoint, a file in shared memory, a run driven by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support_run import CliRun

_WRITE = """
import sys
from pathlib import Path
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
write_checkpoint(Path(sys.argv[1]), seed=0)
"""


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-VL checkpoint with random weights; made in a child so that tests without torch stay without."""
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    subprocess.run([sys.executable, "-c", _WRITE, str(out)], check=True, capture_output=True, timeout=300)
    return out


@pytest.fixture
def shm() -> Iterator[Path]:
    """A place in shared memory for one file; it is gone after the test."""
    path = Path("/dev/shm") / f"omnifleet-test-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def cli_run(tmp_path: Path, random_checkpoint: Path) -> Iterator[Callable[..., CliRun]]:
    """Make runs with fake engines and a fake policy: everything else is real. Stops them and looks for orphans."""
    made: list[CliRun] = []

    def make(*overrides: str, engine: str = "fake") -> CliRun:
        base = [
            f"model.path={random_checkpoint}",
            "trainer.backend=fake",
            "data.max_prompt_tokens=160",
            "sampling.max_tokens=16",
            "trainer.prompts_per_step=4",
            "trainer.generations_per_prompt=4",
            "trainer.checkpoint_every=3",
            "evaluation.size=8",
            "rollout.workers=2",
            "trainer.groups_at_once=null",
            "evaluation.every=0",
            "evaluation.controls=false",
        ]
        made.append(CliRun(tmp_path, [*base, *overrides], engine=engine))
        return made[-1]

    yield make
    for run in made:
        run.close()
