"""The twin of the CLEVR recipe, the model's own family on both sides: vLLM's CPU engine and AutoModel, each service a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.support_run import CliRun


@pytest.mark.heavy
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_twin_trains_two_steps_with_a_real_engine(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "model")
    run = CliRun(
        tmp_path, [f"model.path={tmp_path / 'model'}"], engine="vllm", recipe="twins/clevr-automodel"
    )
    summary, steps = run.to_the_end(800)
    ledger = summary["ledger"]
    assert (ledger["consumed"], ledger["consumed_twice"], ledger["lost"]) == (2 * 8, 0, 0)
    assert [row["step"] for row in steps] == [0, 1, 2]
    for row in steps[1:]:  # of three passes: before the updates, of the reference, and the updates
        assert (row["media_references"], row["media_encoded"]) == (3 * 8, 3 * 2)
    assert summary["tmpe_max"] < 1.05, "bfloat16 on both sides"
