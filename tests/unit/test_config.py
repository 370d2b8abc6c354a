"""Recipes: inheritance, overrides, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet.config import load_recipe
from omnifleet.config.load import apply_overrides, dump_recipe, merge, read_layers, recipe_from_mapping
from omnifleet.errors import OmnifleetError, Reason

BODY = {
    "run": {"name": "t"},
    "model": {"path": "tiny"},
    "reward": [{"name": "format"}],
    "data": {"max_prompt_tokens": 512},
}


def refusal(body: dict[str, object]) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        recipe_from_mapping(body, "test")
    assert caught.value.reason is Reason.INVALID_CONFIG
    return caught.value


def test_unknown_key_is_an_error_with_a_suggestion() -> None:
    error = refusal(merge(BODY, {"trainer": {"stpes": 3}}))
    assert "trainer.stpes" in error.message and "did you mean 'steps'" in error.message


def test_unknown_key_without_a_near_name_lists_what_is_allowed() -> None:
    error = refusal(merge(BODY, {"run": {"zzzzzzz": 3}}))
    assert "allowed here: name, root, seed" in error.message


def test_wrong_value_names_field_value_and_rule() -> None:
    error = refusal(merge(BODY, {"trainer": {"steps": -1}}))
    assert "trainer.steps = -1" in error.message and "greater than or equal to 1" in error.message
    assert error.knob == "trainer.steps"


def test_every_problem_is_told_at_once() -> None:
    error = refusal(merge(BODY, {"trainer": {"steps": -1, "sampler": "newest"}, "colour": 1}))
    assert all(part in error.message for part in ("trainer.steps", "trainer.sampler", "colour"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"max_prompt_tokens": 9000}}, "max_model_len"),
        ({"sampling": {"top_p": 0.9}}, "logprobs_mode = raw"),
        ({"trainer": {"generations_per_prompt": 1}}, "generations_per_prompt >= 2"),
        ({"trainer": {"prompts_per_step": 512}}, "gateway.queue_per_run"),
        ({"trainer": {"batch_samples": 7}}, "does not divide"),
        ({"objective": {"ratio": "sequence"}}, "reduction = sequence"),
        (
            {"objective": {"truncation": "tis", "importance_correction": False}},
            "importance_correction = true",
        ),
        (
            {
                "rollout": {"engine": {"arguments": {"quantization": "fp8"}}},
                "objective": {"importance_correction": False},
            },
            "set objective.importance_correction = true",
        ),
        (
            {"data": {key: {"dataset": "avqa", "path": "/x"} for key in ("train", "heldout")}},
            "rollout.engine.sounds_per_prompt is 0",
        ),
        ({"gateway": {"heartbeat_s": 9.0}}, "heartbeat_s 9.0 < suspect_after_s"),
        ({"rollout": {"workers": 9}}, "max_workers"),
    ],
)
def test_cross_field_checks_name_the_knob(change: dict[str, object], words: str) -> None:
    assert words in refusal(merge(BODY, change)).message


def test_inheritance_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nl: [1, 2]\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\na: {y: 3}\nl: [9]\n")
    assert read_layers(tmp_path / "top.yaml") == {"a": {"x": 1, "y": 3}, "l": [9]}


def test_inheritance_in_a_circle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(OmnifleetError, match="deeper"):
        read_layers(tmp_path / "a.yaml")


def test_overrides_are_yaml_and_nest() -> None:
    body = apply_overrides({"a": {"b": 1}}, ["a.c=[1, 2]", "a.b=2.5"])
    assert body == {"a": {"b": 2.5, "c": [1, 2]}}
    with pytest.raises(OmnifleetError, match=r"form section\.field=value"):
        apply_overrides({}, ["trainer.steps"])


def test_resolved_recipe_loads_to_itself() -> None:
    recipe = recipe_from_mapping(BODY, "test")
    import yaml

    assert recipe_from_mapping(yaml.safe_load(dump_recipe(recipe)), "again") == recipe


def test_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(OmnifleetError, match="cpu-tiny"):
        load_recipe("no-such-recipe")


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_packaged_recipes_are_right(path: Path) -> None:
    load_recipe(str(path))
