"""On a GPU machine: the run of recipes/h200-tiny.yaml, engine and trainer on one device.

Run: python -m pytest tests/gpu -m gpu  (needs vLLM 0.25.1 or newer and AutoModel; see docs/operations.md)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "h200-tiny.yaml"


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_engine_and_trainer_agree_on_a_gpu(random_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "omnifleet", "train", str(RECIPE), f"model.path={random_checkpoint}"]
    command += [f"run.root={tmp_path}", "trainer.steps=6", "evaluation.controls=false", "evaluation.size=32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "h200-tiny" / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["refits"] == 7
    assert summary["ledger"]["consumed_twice"] == 0
    assert summary["tmpe_max"] < 1.05, "bfloat16 on both sides"
