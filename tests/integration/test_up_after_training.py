"""What a newcomer does next: look at a run that is done and at its report, keep its services up, ask the model."""

from __future__ import annotations

from collections.abc import Callable

from tests.support_run import RECIPE, CliRun, until


def test_a_finished_run_says_so_and_serves_again(cli_run: Callable[..., CliRun]) -> None:
    run = cli_run("trainer.steps=2")
    run.train()
    assert run.finish(240) == 0
    page = (run.run_dir / "report.html").read_text()
    assert "of 2, " in page and "0 prompts lost" in page and "replies trained on twice" in page
    shown = page.count('class="picture"')
    assert shown > 0 and "are not shown" not in page
    assert (run.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    command = [str(RECIPE), *run.overrides, "--engine", "fake"]
    again = run.omnifleet("train", *command)
    assert "is done: 2 steps, held-out reward" in again and "trainer.steps=N extends it" in again
    said = run.omnifleet("up", *command)
    assert "next: omnifleet train" in said and "trainer.steps=2" in said
    # The registry of the run's first life asked for weights that no trainer is left to bring.
    until(lambda: [w["state"] for w in run.workers()] == ["ready", "ready"], 60, "both workers serve")
    status = run.omnifleet("status")
    assert "2 workers ready" in status and "workers_ready" not in status
    assert "is down" in run.omnifleet("down")
    assert "is not up" in run.omnifleet("down")
    (run.run_dir / "report.html").unlink()
    assert "report.html" in run.omnifleet("report", str(run.run_dir))
    page = (run.run_dir / "report.html").read_text()
    assert page.count('class="picture"') == shown, "pictures are kept for when the media service is down"
    assert "worker-0" in page and "tokens generated" in page
