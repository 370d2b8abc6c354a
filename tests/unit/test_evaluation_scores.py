"""pass@k, patience, tasks of held-out rows, scorers of a task."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from omnifleet.config.load import recipe_from_mapping
from omnifleet.config.recipe import EvaluationConfig
from omnifleet.errors import OmnifleetError
from omnifleet_trainer.evaluation.heldout import pass_at_k
from omnifleet_trainer.evaluation.patience import out_of_patience
from omnifleet_trainer.server.settings import own_scorers
from tests.unit.loop_world import world

BASE = {"run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}]}


def test_pass_at_k_counts_subsets() -> None:
    for n in range(1, 7):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([at < passed for at in range(n)], k))
                assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_patience_by_hand() -> None:
    assert not out_of_patience([0.5, 0.4, 0.4], patience=None, min_gain=0)
    assert not out_of_patience([0.5, 0.4], patience=2, min_gain=0)
    assert out_of_patience([0.5, 0.4, 0.5], patience=2, min_gain=0)  # as good is not better
    assert not out_of_patience([0.5, 0.4, 0.51, 0.5], patience=2, min_gain=0)
    assert out_of_patience([0.5, 0.51, 0.52], patience=2, min_gain=0.05)
    assert not out_of_patience([], patience=1, min_gain=0)


async def test_a_run_whose_score_does_not_move_ends_early_and_says_so(tmp_path: Path) -> None:
    evaluation = EvaluationConfig(size=2, every=1, patience=3)
    with world(tmp_path, steps=50, evaluation=evaluation) as w:
        assert await w.controller.run()
        summary = await w.controller.summary()
    assert len(w.policy.trained) == 3 and summary["settled"] and w.checkpoints[-1] == 3


async def test_held_out_rows_may_be_asked_several_times(tmp_path: Path) -> None:
    # Sample i of a row earns i / 10: four replies average 0.15, and one of four earns at least 0.3.
    evaluation = EvaluationConfig(size=2, generations=4, pass_at=(1, 2, 4), pass_reward=0.3)
    with world(tmp_path, steps=1, evaluation=evaluation) as w:
        assert await w.controller.run()
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first["heldout_reward"] == pytest.approx(0.15)
    assert [first[f"heldout_pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])


def test_held_out_rows_must_be_of_a_trained_task() -> None:
    other = {**BASE, "data": {"heldout": {"dataset": "clevr-cogent", "split": "valA"}}}
    with pytest.raises(OmnifleetError, match=r"clevr-cogent.*other_tasks"):
        recipe_from_mapping(other, "test")
    recipe_from_mapping({**other, "evaluation": {"other_tasks": True}}, "test")


def test_a_set_may_bring_scorers_of_its_own_and_a_task_has_one_reward() -> None:
    clicks = {"dataset": "custom", "path": "rows.jsonl", "task": "click", "reward": [{"name": "exact_alnum"}]}
    both = {"train": [{"dataset": "synthetic-clevr"}, clicks]}
    recipe = recipe_from_mapping({**BASE, "data": both}, "test")
    assert {task: [s.name for s in scorers] for task, scorers in own_scorers(recipe).items()} == {
        "click": ["exact_alnum"]
    }
    twice = {"train": [clicks, {**clicks, "reward": [{"name": "format"}]}], "heldout": clicks}
    with pytest.raises(OmnifleetError, match="two rewards"):
        recipe_from_mapping({**BASE, "data": twice}, "test")
    with pytest.raises(OmnifleetError, match="every set one"):
        recipe_from_mapping({**BASE, "data": {"train": [{"weight": 1}, clicks]}}, "test")
    with pytest.raises(OmnifleetError, match="needs a path"):
        recipe_from_mapping({**BASE, "data": {"train": {"dataset": "custom"}}}, "test")
    with pytest.raises(OmnifleetError, match=r"pass_at"):
        recipe_from_mapping({**BASE, "evaluation": {"generations": 2, "pass_at": [4]}}, "test")
