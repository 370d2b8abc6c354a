"""The oracle on a real engine: after refits, refused, of few values, half, in place, 64 prompts score as on a fresh engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


def test_a_refitted_engine_scores_as_a_fresh_one(tmp_path: Path) -> None:
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", seed=0)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.refit_engine_child", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["moved"] and result["kept"] and result["version"] == 8
    assert "checksum" in result["refused"]
    assert result["ours"] == result["theirs"], "bit for bit"
    assert result["fenced"] == "fenced" and not result["fence"], (
        "a load broke half-way; a complete refit mends that"
    )
    assert result["mended"] == result["theirs"], "nothing is left of the load that broke"
    assert "checksum" in result["in_place"], "half of it was in place: fenced"
    assert result["placed"] == result["theirs"], "without a shadow, from what half a refit had left"
