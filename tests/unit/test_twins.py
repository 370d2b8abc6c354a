"""The small twins of the reference's recipes: the same settings but for size, and what they may not be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config import load_recipe
from omnifleet.config.load import known_recipes
from omnifleet.errors import OmnifleetError

TWINS = (
    "clevr-automodel",
    "mmpr-automodel",
    "clevr-megatron",
    "mmpr-megatron",
    "gym-video",
    "gym-video-async",
)
SIZE = (
    "run.name",
    "model.*",
    "cluster*",
    "data.train.*",
    "data.heldout.*",
    "data.max_prompt_tokens",
    "reward",
    "sampling.max_tokens",
    "sampling.bad_words",
    "evaluation.size",
    "metrics.sinks",
    "trainer.dtype",
    "trainer.threads",
    "trainer.steps",
    "trainer.prompts_per_step",
    "trainer.generations_per_prompt",
    "trainer.batch_samples",
    "trainer.micro_batch_tokens",
    "trainer.logprob_chunk",
    "trainer.parallel.*",
    "reward_service.processes",
    "refit.transport",
    "rollout.workers",
    "rollout.sleep_level",
    "rollout.max_workers",
    "rollout.engine.*",
)
"""What a twin may change. Objective, optimiser, loop, KV policy, gateway and logprobs are not among them."""


def leaves(body: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        else:
            yield here, value


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_in_size_alone(name: str) -> None:
    large = dict(leaves(load_recipe(f"nemotron-omni/{name}", plan=True).model_dump(mode="json")))
    small = dict(leaves(load_recipe(f"twins/{name}").model_dump(mode="json")))
    changed = {path for path in large.keys() | small.keys() if large.get(path) != small.get(path)}
    assert {path for path in changed if not any(fnmatchcase(path, pattern) for pattern in SIZE)} == set()
    assert "trainer.parallel.dp" not in small or small["trainer.parallel.dp"] == 1


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_keeps_how_many_updates_a_step_makes_to_one_or_several(name: str) -> None:
    updates = []
    for recipe in (load_recipe(f"nemotron-omni/{name}", plan=True), load_recipe(f"twins/{name}")):
        trainer = recipe.trainer
        samples = trainer.prompts_per_step * trainer.generations_per_prompt
        updates.append(samples // (trainer.batch_samples or samples) > 1)
    assert updates[0] == updates[1], "with several, later ones are off-policy and the clip matters"


@pytest.mark.parametrize(("name", "sizes"), [("dense-tp2", (1, 2, 1)), ("moe-ep2", (2, 1, 2))])
def test_two_ranks_are_tensor_or_expert_parallel(name: str, sizes: tuple[int, int, int]) -> None:
    parallel = load_recipe(f"twins/{name}").trainer.parallel
    assert (parallel.dp, parallel.tp, parallel.ep) == sizes and parallel.world == 2


@pytest.mark.parametrize(
    ("sizes", "why"),
    [("{tp: 2, dp: 2, ep: 2}", "needs sequence parallelism"), ("{sp: true, tp: 1}", "of the ranks of tp")],
)
def test_layouts_that_fit_no_model_are_refused(sizes: str, why: str) -> None:
    with pytest.raises(OmnifleetError, match=why):
        load_recipe("twins/dense-tp2", [f"trainer.parallel={sizes}"])


@pytest.mark.parametrize("sizes", ["{tp: 2, ep: 2, sp: true}", "{tp: 2, sp: true}", "{cp: 2, tp: 1}"])
def test_layouts_that_elsewhere_want_transformer_engine_are_taken(sizes: str) -> None:
    assert load_recipe("twins/dense-tp2", [f"trainer.parallel={sizes}"]).trainer.parallel.world == 2


def test_parts_are_no_recipes() -> None:
    assert not [name for name in known_recipes() if name.rpartition("/")[2].startswith("_")]
    assert {f"twins/{name}" for name in TWINS} <= set(known_recipes())


def test_a_recipe_may_extend_several_files(tmp_path: Path) -> None:
    from omnifleet.config.load import read_layers

    (tmp_path / "a.yaml").write_text("a: {x: 1, y: 1}\n")
    (tmp_path / "b.yaml").write_text("a: {y: 2}\nb: 2\n")
    (tmp_path / "top.yaml").write_text("extends: [a.yaml, b.yaml]\nb: 3\n")
    assert read_layers(tmp_path / "top.yaml") == {"a": {"x": 1, "y": 2}, "b": 3}
