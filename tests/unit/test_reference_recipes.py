"""NeMo RL's six recipes of Nemotron 3 Nano Omni, field by field, and what other clusters make of them."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omnifleet.cli.main import whole_app
from omnifleet.config import Recipe, load_recipe
from omnifleet.config.load import dump_recipe, recipe_from_mapping
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.placement import Place, place

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("render_recipes", ROOT / "scripts" / "render_recipes.py")
assert _spec is not None and _spec.loader is not None
render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render)

ROWS = [(section, row) for section, rows in render.rows().items() for row in rows]


@cache
def ours(name: str, *overrides: str) -> Recipe:
    return load_recipe(f"nemotron-omni/{name}", overrides, plan=True)


def resolved(recipe: Recipe, path: str) -> Any:
    value: Any = recipe.model_dump(mode="json")
    for part in path.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize(("section", "row"), ROWS, ids=[f"{s}: {r['field']}" for s, r in ROWS])
def test_every_field_of_the_reference_is_ours_or_says_why(section: str, row: dict[str, Any]) -> None:
    if "ours" not in row:
        assert row["why"] and "value" not in row and "as" not in row
        return
    if "value" in row:
        assert row["why"], "a value that differs says why"
    for name, want in zip(render.RECIPES.values(), render.expected(row), strict=True):
        if want == render.NONE:
            continue
        found = resolved(ours(name), row["ours"])
        assert found == want and isinstance(found, bool) == isinstance(want, bool), f"{name}: {row['ours']}"


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert render.page(text) == text, "run python scripts/render_recipes.py"


def test_a_value_that_differs_is_no_value_that_is_equal() -> None:
    """`value` stands only where at least one recipe differs: the column cannot hide an agreement, nor go stale."""
    for _, row in ROWS:
        if "value" in row:
            pairs = zip(render.six(row["reference"], row), render.six(row["value"], row), strict=True)
            assert any(theirs != mine for theirs, mine in pairs), row["field"]


@pytest.mark.parametrize("name", render.RECIPES.values())
def test_a_resolved_recipe_resolves_to_itself(name: str) -> None:
    import yaml

    again = recipe_from_mapping(yaml.safe_load(dump_recipe(ours(name))), name, plan=True)
    assert again == ours(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mmpr-automodel", "trainer.parallel.nodes says 1"),
        ("mmpr-megatron", "trainer.parallel.nodes says 1"),
        ("gym-video", "trainer.parallel.nodes says 1"),
        ("gym-video-async", "trainer.parallel.nodes says 1"),
    ],
)
def test_ranks_on_several_nodes_are_said(name: str, why: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        load_recipe(f"nemotron-omni/{name}")
    assert caught.value.reason is Reason.INVALID_CONFIG
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("name", "nodes", "sizes"),
    [
        ("clevr-automodel", 1, (8, 1, 8)),
        ("clevr-megatron", 1, (1, 8, 8)),
        ("mmpr-automodel", 4, (32, 1, 8)),
        ("mmpr-megatron", 4, (4, 8, 16)),
        ("gym-video", 2, (4, 4, 4)),
        ("gym-video-async", 2, (4, 4, 4)),
    ],
)
def test_all_have_sizes_that_their_backend_has(name: str, nodes: int, sizes: tuple[int, int, int]) -> None:
    parallel = load_recipe(f"nemotron-omni/{name}", [f"trainer.parallel.nodes={nodes}"]).trainer.parallel
    assert (parallel.dp, parallel.tp, parallel.ep) == sizes


@pytest.mark.parametrize("size", ["pp", "cp"])
def test_megatron_does_not_divide_the_hybrid_by_stages_or_along_sequences(size: str, tmp_path: Path) -> None:
    changes = ["model.family=nemotron_omni", "trainer.backend=megatron", f"trainer.parallel={{{size}: 2}}"]
    with pytest.raises(OmnifleetError, match=f"trainer.parallel.{size}: .* set {size} = 1"):
        load_recipe("cpu-tiny", changes)
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h_omni"}')
    with pytest.raises(OmnifleetError, match=f"set {size} = 1"):
        load_recipe("cpu-tiny", [*changes[1:], f"model.path={tmp_path}"])
    assert load_recipe("cpu-tiny", changes[1:]).trainer.parallel.world == 2


# ---------------------------------------------------------------- placement


def taken(places: tuple[Place, ...]) -> set[tuple[int, int]]:
    gpus = [(place.node, gpu) for place in places for gpu in place.gpus]
    assert len(gpus) == len(set(gpus)), "one GPU, one process of a kind"
    return set(gpus)


@pytest.mark.parametrize("name", render.RECIPES.values())
def test_a_placement_fills_the_cluster(name: str) -> None:
    recipe = ours(name)
    placed, cluster = place(recipe), recipe.cluster
    assert cluster is not None
    policy, engines = taken(placed.policy), taken(placed.engines)
    everything = {(n, g) for n in range(cluster.nodes) for g in range(cluster.gpus_per_node)}
    assert policy | engines == everything
    assert policy & engines == (everything if cluster.colocated else set())
    tp, size = recipe.trainer.parallel.tp, recipe.rollout.engine.tensor_parallel_size
    for first in range(0, len(placed.policy), tp):
        assert len({rank.node for rank in placed.policy[first : first + tp]}) == 1, (
            "a tp group crosses no node"
        )
    assert {len(engine.gpus) for engine in placed.engines} == {size}


def test_fourteen_nodes_generate_and_two_train() -> None:
    placed = place(ours("gym-video-async"))
    assert {rank.node for rank in placed.policy} == {0, 1} and len(placed.policy) == 16
    assert {engine.node for engine in placed.engines} == set(range(2, 16)) and len(placed.engines) == 28
    assert placed.engines[-1] == Place("worker-27", 15, (4, 5, 6, 7))


def test_a_colocated_node_is_shared() -> None:
    placed = place(ours("clevr-megatron"))
    assert placed.engines == (Place("worker-0", 0, tuple(range(8))),)
    assert [rank.gpus for rank in placed.policy] == [(gpu,) for gpu in range(8)]


def test_the_command_shows_it() -> None:
    shown = CliRunner().invoke(whole_app(), ["config", "placement", "nemotron-omni/gym-video-async"])
    assert shown.exit_code == 0
    assert "16 node(s) x 8 GPUs, apart" in shown.output
    assert "node   1  policy-8 to 15" in shown.output
    assert "node  15  worker-26 on GPU 0-3, worker-27 on GPU 4-7" in shown.output
    as_json = CliRunner().invoke(
        whole_app(), ["config", "placement", "nemotron-omni/gym-video-async", "cluster.nodes=4", "--json",
                      "cluster.generation_nodes=2"]
    )  # fmt: skip
    body = json.loads(as_json.output)
    assert [len(body[kind]) for kind in ("policy", "engines")] == [16, 4] and body["colocated"] is False


def test_a_recipe_without_a_cluster_has_no_placement() -> None:
    with pytest.raises(OmnifleetError, match=r"set cluster\.nodes"):
        place(load_recipe("cpu-tiny"))


# ---------------------------------------------------------------- other clusters


@pytest.mark.parametrize(
    ("name", "overrides", "dp", "engines"),
    [
        ("gym-video-async", ("cluster.nodes=8", "cluster.generation_nodes=6"), 4, 12),
        ("gym-video-async", ("cluster.nodes=3", "cluster.generation_nodes=2"), 2, 4),
        ("mmpr-megatron", ("cluster.nodes=2",), 2, 8),
        ("mmpr-automodel", ("cluster.nodes=2",), 16, 2),
        ("clevr-automodel", ("cluster.nodes=4",), 32, 4),
        ("gym-video", ("cluster.gpus_per_node=4",), 2, 2),
    ],
)
def test_another_cluster_is_laid_out_anew(
    name: str, overrides: tuple[str, ...], dp: int, engines: int
) -> None:
    recipe = ours(name, *overrides)
    assert (recipe.trainer.parallel.dp, recipe.rollout.workers) == (dp, engines)
    assert recipe.rollout.max_workers >= engines
    assert place(recipe).engines[-1].name == f"worker-{engines - 1}"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("clevr-megatron", ("cluster.gpus_per_node=4",), "lower trainer.parallel.tp"),
        ("clevr-automodel", ("cluster.gpus_per_node=4",), "lower it"),
        ("clevr-automodel", ("cluster.nodes=3",), "cannot be dealt to 24"),
        ("mmpr-megatron", ("cluster.nodes=1",), "trainer.parallel.ep 16 does not divide"),
        ("mmpr-megatron", ("trainer.parallel.tp=6",), "does not divide the 32 GPUs"),
        ("gym-video", ("trainer.parallel.dp=3",), "leave dp out"),
        ("gym-video", ("rollout.workers=3",), "leave rollout.workers out"),
        ("gym-video-async", ("cluster.nodes=14",), "leaves none of cluster.nodes 14 to train"),
    ],
)
def test_a_cluster_that_does_not_fit_is_refused(name: str, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        ours(name, *overrides)
    assert words in caught.value.message and caught.value.reason is Reason.INVALID_CONFIG


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster={nodes: 1, gpus_per_node: 1}",), "set rollout.sleep_level = 1"),
        (
            ("cluster={nodes: 2, gpus_per_node: 1, generation_nodes: 1}", "rollout.sleep_level=1"),
            "leave it out",
        ),
    ],
)
def test_engines_that_share_gpus_take_turns(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        load_recipe("h200-tiny", overrides)
    assert words in caught.value.message


def test_a_policy_of_several_nodes_is_said_to_be_one() -> None:
    overrides = ("cluster={nodes: 3, gpus_per_node: 1, generation_nodes: 1}",)
    with pytest.raises(OmnifleetError, match="gives the policy 2 node"):
        load_recipe("h200-tiny", overrides)
    assert load_recipe("h200-tiny", overrides, plan=True).trainer.parallel.dp == 2
    assert load_recipe("h200-tiny", (*overrides, "trainer.parallel.nodes=2")).trainer.parallel.world == 2
