"""A taskset of verifiers, the published package, whose harness asks through the episode's address; long, for its environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.nemo_gym_world import ROOT, environment_folder

PLAY = Path(__file__).with_name("verifiers_sums.py")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_taskset_s_rewards_are_the_episodes(tmp_path: Path) -> None:
    folder = environment_folder("verifiers")
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{PLAY.parent}",
    }
    command = [folder / "bin" / "python", PLAY, "3", "three"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    right, wrong = (json.loads(line) for line in done.stdout.splitlines())
    assert right[:2] == [1.5, {"right": 1.0, "short": 0.5}]
    assert wrong[:2] == [0.0, {"right": 0.0, "short": 0.0}]
    assert [message["content"] for message in right[2]] == ["1+2=?", "3"]
