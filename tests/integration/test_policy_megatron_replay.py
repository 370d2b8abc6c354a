"""Routing replay in the Megatron policy: what AutoModel computes with the same choice of experts, value by value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.megatron import MegatronPolicy
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.policy.replay import check_replayable
from omnifleet_trainer.tiny.hybrid import MIXED, write_hybrid
from omnifleet_trainer.tiny.mixture import CHOSEN, EXPERTS, write_mixture
from tests.integration.batch_sample import draw_experts
from tests.integration.family_world import batch_for, close_to
from tests.integration.nemotron_world import batch_for as nemotron_batch
from tests.integration.rank_world import opened
from tests.integration.test_policy_megatron_world import with_tower_heads
from tests.integration.test_policy_nemotron_megatron import opened as nemotron

pytestmark = pytest.mark.heavy
LAYERS = 2
Found = tuple[list[Any], list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "mixture"
    write_mixture(folder, layers=LAYERS)
    with_tower_heads(folder, 2)  # for two ranks to share
    return folder


def batch_of(source: Path) -> StepBatch:
    batch = batch_for(source)
    draw_experts(batch, LAYERS, EXPERTS, CHOSEN)
    return batch


@contextmanager
def policy_of(
    source: Path, backend: str, parallel: dict[str, int] | None = None, **changes: Any
) -> Iterator[Policy]:
    policy = opened(source, parallel, backend=backend, **changes)
    try:
        yield policy
    finally:
        policy.close()


def worked(policy: Policy, source: Path, folder: Path) -> Found:
    """Logprobs; loss and gradient norm of two steps; the gradient of every weight, as AdamW's moment holds it."""
    batch = batch_of(source)
    logprobs = policy.logprobs(batch)
    steps = [policy.train(batch) for _ in range(2)]
    policy.save(folder)
    moments = {
        name: tensor
        for file in (folder / "optimizer").glob("moments*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("exp_avg/")
    }
    return logprobs, [(step["loss"], step["grad_norm"]) for step in steps], moments


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    with policy_of(source, "automodel") as policy:
        return worked(policy, source, tmp_path_factory.mktemp("automodel"))


def alike(ours: Found, theirs: Found) -> None:
    """To 4 digits."""
    close_to(ours[0], theirs[0], rtol=1e-5)
    assert np.ravel(ours[1]) == pytest.approx(np.ravel(theirs[1]), rel=1e-4, abs=1e-5)
    assert ours[2].keys() == theirs[2].keys() and any(".gate." in name for name in ours[2])
    for name, tensor in theirs[2].items():
        atol = 1e-4 * float(tensor.abs().max()) + 1e-9
        torch.testing.assert_close(ours[2][name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("changes", [{}, {"packing": False}, {"recompute": True}])
def test_values_and_gradients_are_those_of_automodel(
    source: Path, reference: Found, changes: dict[str, Any], tmp_path: Path
) -> None:
    with policy_of(source, "megatron", **changes) as policy:
        own = policy.logprobs(batch_for(source))
        alike(worked(policy, source, tmp_path), reference)
    assert max(float(np.abs(a - b).max()) for a, b in zip(own, reference[0], strict=True)) > 1e-3


def test_layers_of_automodel_that_recompute_route_as_they_did(
    source: Path, reference: Found, tmp_path: Path
) -> None:
    with policy_of(source, "automodel", recompute=True) as policy:
        alike(worked(policy, source, tmp_path), reference)


def test_what_is_of_another_model_is_refused_and_other_models_are_left_alone(source: Path) -> None:
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda experts: experts[:, :1], "1 mixture layers, the trainer's model has 2"),
        (lambda experts: experts[..., :1], "to 1 experts"),
        (lambda experts: experts + 2, "up to number 5"),
    ]
    with policy_of(source, "megatron") as policy:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        known = list(RouterReplay.global_router_replay_instances)
        other = RouterReplay()
        other.set_target_indices(torch.zeros(3, 2, dtype=torch.int64))
        other.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            expected = policy.logprobs(batch_for(source))
            for spoil, words in cases:
                batch = batch_of(source)
                for sample in batch.samples:
                    sample.experts = None if sample.experts is None else spoil(sample.experts)
                with pytest.raises(OmnifleetError, match=words) as refused:
                    policy.logprobs(batch)
                assert refused.value.reason is Reason.INVALID_REQUEST
            policy.logprobs(batch_of(source))
            for ours, before in zip(policy.logprobs(batch_for(source)), expected, strict=True):
                np.testing.assert_array_equal(ours, before)
            assert RouterReplay.global_router_replay_instances == [*known, other]
            assert other.router_replay_action is RouterReplayAction.REPLAY_FORWARD
            assert len(other.replay_backward_list) == 1
        finally:
            RouterReplay.global_router_replay_instances[:] = known


def test_a_dense_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    with pytest.raises(OmnifleetError, match="by megatron") as refused:
        check_replayable(tmp_path, "megatron")
    assert refused.value.reason is Reason.UNSUPPORTED


@pytest.mark.soak
@pytest.mark.parametrize(
    "parallel", [{"dp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}, {"tp": 2, "sp": True}, {"cp": 2}]
)
def test_each_rank_replays_its_own_tokens(
    source: Path, reference: Found, parallel: dict[str, int], tmp_path: Path
) -> None:
    with policy_of(source, "megatron", parallel) as policy:
        alike(worked(policy, source, tmp_path), reference)


@pytest.mark.soak
def test_a_hybrid_routes_in_either_backend_as_an_engine_said_of_all_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sigmoid gates and a factor; of four layers one routes."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)  # megatron-core wants them alike of all models of a process
    source = tmp_path / "model"
    write_hybrid(source, pattern=MIXED)
    text = json.loads((source / "config.json").read_text())["text_config"]
    batch, random = nemotron_batch(source), np.random.default_rng(4)
    for sample in batch.samples:
        draws = random.random((sample.length - 1, len(MIXED), text["n_routed_experts"]))
        sample.experts = draws.argsort(-1)[..., : text["num_experts_per_tok"]]
    results = []
    ways: list[tuple[Any, dict[str, Any]]] = [
        (AutoModelPolicy, {}),
        (MegatronPolicy, {}),
        (MegatronPolicy, {"packing": False}),
    ]
    for make, changes in ways:
        with closing(nemotron(make, source, **changes)) as policy:
            own = policy.logprobs(nemotron_batch(source))
            rows = [policy.train(batch) for _ in range(2)]
            results.append((policy.logprobs(batch), [(row["loss"], row["grad_norm"]) for row in rows]))
    for logprobs, steps in results[1:]:
        close_to(logprobs, results[0][0], rtol=1e-4)
        assert np.ravel(steps) == pytest.approx(np.ravel(results[0][1]), rel=1e-4, abs=1e-5)
    assert max(float(np.abs(a - b).max()) for a, b in zip(own, results[0][0], strict=True)) > 1e-3
