"""One asynchronous run on real engines: vLLM on the CPU, AutoModel, every service a process; killed and resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omnifleet.report.records import read_run
from tests.support_run import CliRun

STEPS = 8


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_real_engines_survive_kills_and_agree_with_the_trainer(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run(
        "trainer.backend=automodel",
        "trainer.prompts_per_step=8",
        "trainer.generations_per_prompt=4",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=2",
        "trainer.optimizer.lr=1e-5",
        "evaluation.size=16",
        "data.train.size=256",
        engine="vllm",
    )
    run.train()
    run.wait_step(1, 240)
    run.kill("worker-0")
    run.wait_step(3)
    run.kill("trainer")
    assert run.finish(240) == 0

    summary, steps = run.summary(), read_run(run.run_dir).steps
    ledger = summary["ledger"]
    assert (ledger["consumed"], ledger["consumed_twice"], ledger["lost"]) == (STEPS * 32, 0, 0)
    assert [row["step"] for row in steps] == list(range(STEPS + 1))
    # The steps are too small to move the policy far in one step of lag: more than this is a stale or mixed weight.
    assert summary["tmpe_max"] < 1.02
    assert min(row["lag_max"] for row in steps[1:]) >= 0 and max(row["lag_max"] for row in steps[1:]) <= 1
    assert summary["media"]["bytes_streamed"] == 0, "same-host readers map shared memory"
    assert len({row["lineage"] for row in steps}) == 2
