"""What may be asked of a run that is up, and which run a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet.cli.where import find_run
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.plan import check_unchanged, prepare_run


def test_a_run_that_trains_keeps_its_settings() -> None:
    running = load_recipe("cpu-tiny", ("evaluation.size=64",))
    check_unchanged(running, load_recipe("cpu-tiny", ("evaluation.size=64",)), training=True)
    with pytest.raises(OmnifleetError) as refused:
        check_unchanged(running, load_recipe("cpu-tiny", ("evaluation.size=32",)), training=True)
    assert refused.value.reason is Reason.CONFLICT and refused.value.knob == "evaluation.size"
    assert "evaluation.size is 64, asked 32" in refused.value.message
    assert "omnifleet down --run cpu-tiny" in refused.value.message


def test_before_training_what_the_trainer_reads_may_change() -> None:
    running = load_recipe("cpu-tiny")
    check_unchanged(running, load_recipe("cpu-tiny", ("trainer.steps=3",)), training=False)
    with pytest.raises(OmnifleetError, match=r"rollout\.workers is 2, asked 3"):
        check_unchanged(running, load_recipe("cpu-tiny", ("rollout.workers=3",)), training=False)


def test_the_recipe_that_a_run_left_is_the_run_s_own(tmp_path: Path) -> None:
    recipe = load_recipe("cpu-tiny", (f"run.root={tmp_path}", "run.name=mine", "trainer.steps=7"))
    again = load_recipe(str(prepare_run(recipe) / "recipe.yaml"), ())
    assert again == recipe


def test_nobody_means_a_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo-0", "demo-0-control"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("")
    assert find_run("").name == "demo-0"
    assert find_run("demo-0-control").name == "demo-0-control"
