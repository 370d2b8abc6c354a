"""What a newcomer does next: look at a run that is done, keep its services up, ask the model."""

from __future__ import annotations

from collections.abc import Callable

from tests.support_run import RECIPE, CliRun, until


def test_a_finished_run_says_so_and_serves_again(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run("trainer.steps=2")
    run.train()
    assert run.finish(240) == 0
    command = [str(RECIPE), *run.overrides, "--engine", "fake"]
    again = run.omnifleet("train", *command)
    assert "is done: 2 steps, held-out reward" in again and "trainer.steps=N extends it" in again
    said = run.omnifleet("up", *command)
    assert "next: omnifleet train" in said and "trainer.steps=2" in said
    # The registry of the run's first life asked for weights that no trainer is left to bring.
    until(lambda: [w["state"] for w in run.workers()] == ["ready", "ready"], 60, "both workers serve")
    assert "is down" in run.omnifleet("down")
    assert "is not up" in run.omnifleet("down")
