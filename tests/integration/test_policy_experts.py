"""A mixture of experts in AutoModel, half of a layer's experts on each of two ranks: the numbers of one rank."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeForConditionalGeneration

from omnifleet_trainer.policy.folder import read_folder
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.hybrid import MIXED, write_hybrid
from omnifleet_trainer.tiny.mixture import CHOSEN, EXPERTS, write_mixture
from tests.integration.batch_sample import draw_experts
from tests.integration.family_world import batch_for, close_to, plain_logprobs
from tests.integration.nemotron_world import batch_for as nemotron_batch
from tests.integration.rank_world import History, equal, history, opened, weights_of
from tests.integration.test_policy_nemotron_world import history as nemotron_history

pytestmark = [pytest.mark.heavy, pytest.mark.soak]
LAYERS = 2
SHARED = {"dp": 2, "ep": 2}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts (E, in, out), as the hub has them."""
    folder = tmp_path_factory.mktemp("hub") / "mixture"
    write_mixture(folder, layers=LAYERS, hidden=64)
    return folder


@pytest.fixture(scope="module")
def source(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with experts (E, out, in), as transformers writes them."""
    folder = tmp_path_factory.mktemp("transformers") / "mixture"
    shutil.copytree(hub, folder)
    tensors = {name: turned(name, tensor) for name, tensor in read_folder(hub)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous() if ".experts." in name else tensor


@contextmanager
def policy_of(source: Path, parallel: dict[str, int] | None = None, **changes: Any) -> Iterator[Policy]:
    policy = opened(source, parallel, **changes)
    try:
        yield policy
    finally:
        policy.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(source: Path, saved: Path) -> History:
    with policy_of(source) as policy:
        return history(policy, source, saved / "alone")


@pytest.fixture(scope="module")
def together(source: Path, alone: History, saved: Path) -> History:
    with policy_of(source, SHARED) as policy:
        return history(policy, source, saved / "together")


@pytest.mark.parametrize("parallel", [None, SHARED])
def test_the_hub_s_experts_load_and_come_back_bit_for_bit(
    hub: Path, alone: History, parallel: dict[str, int] | None
) -> None:
    """With plain transformers' logprobs, and every number of one rank over three steps."""
    plain: Any = Qwen3VLMoeForConditionalGeneration.from_pretrained(hub, dtype=torch.float32).eval()
    batch, stored = batch_for(hub), dict(read_folder(hub))
    with torch.no_grad():
        expected = [plain_logprobs(plain, sample, batch) for sample in batch.samples]
    with policy_of(hub, parallel) as policy:
        sent = weights_of(policy)
        assert sent.keys() == stored.keys()
        assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())
        close_to(policy.logprobs(batch), expected, rtol=1e-5)
        found = history(policy, hub)
    weights = {name: turned(name, tensor) for name, tensor in found.weights.items()}
    equal(History(found.logprobs, found.steps, weights, found.then), alone)


def test_two_ranks_that_share_experts_train_as_one(alone: History, together: History) -> None:
    """Logprobs to 1e-5, loss and gradient norm to 4 digits, and the weights after three steps."""
    equal(together, alone)


def test_their_checkpoint_is_that_of_one_rank(
    source: Path, alone: History, together: History, saved: Path
) -> None:
    folder = saved / "together" / "policy"
    assert checkpoint_shapes(folder) == checkpoint_shapes(source)
    stored = dict(read_folder(folder))
    assert all(torch.equal(stored[name], tensor) for name, tensor in together.weights.items())
    moments, expected = (moments_of(saved / name) for name in ("together", "alone"))
    assert moments.keys() == expected.keys()
    for name, tensor in expected.items():
        atol = 1e-4 * float(tensor.abs().max()) + 1e-9
        torch.testing.assert_close(moments[name], tensor, rtol=0, atol=atol, msg=name)


def moments_of(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "optimizer").glob("moments*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("parallel", "folder"), [(None, "together"), (SHARED, "alone")])
def test_either_goes_on_from_the_other_s_checkpoint(
    source: Path,
    alone: History,
    together: History,
    saved: Path,
    parallel: dict[str, int] | None,
    folder: str,
) -> None:
    with policy_of(source, parallel) as policy:
        policy.load(saved / folder)
        resumed = policy.train(batch_for(source))
    for name in ("loss", "grad_norm", "lr"):
        assert resumed[name] == pytest.approx(alone.then[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("parallel", "changes", "rtol"),
    [
        (SHARED, {"recompute": True, "objective": {"kl_coefficient": 0.1}}, 1e-4),
        (SHARED, {"logprob_chunk": 4, "freeze": ("model.visual.*", "*.mlp.gate.weight")}, 1e-4),
        (SHARED, {"lora": {"rank": 4}}, 1e-4),
        (SHARED, {"dtype": "bfloat16"}, 3e-2),
        ({"dp": 4, "ep": 2}, {}, 1e-4),
    ],
    ids=["recompute", "frozen", "lora", "bfloat16", "four"],
)
def test_every_setting_is_that_of_one_rank(
    source: Path, parallel: dict[str, int], changes: dict[str, Any], rtol: float
) -> None:
    """Of four ranks two each hold the same experts, and FSDP2 spreads those over them."""
    histories = []
    for layout in (None, parallel):
        with policy_of(source, layout, **changes) as policy:
            histories.append(history(policy, source))
            policy.offload()
            policy.onload()
            assert np.isfinite(policy.train(batch_for(source))["loss"])
    equal(histories[1], histories[0], rtol=rtol)


def test_what_the_engine_chose_is_replayed(source: Path) -> None:
    """Random experts, none for one sample: as one rank takes them, and not as the routers would; layers recompute so, too."""
    batch = batch_for(source)
    draw_experts(batch, LAYERS, EXPERTS, CHOSEN)
    found = []
    for parallel in (None, SHARED):
        with policy_of(source, parallel, recompute=parallel is not None) as policy:
            own = policy.logprobs(batch_for(source))
            found.append((policy.logprobs(batch), policy.train(batch)))
    close_to(found[1][0], found[0][0], rtol=1e-5)
    for name in ("loss", "grad_norm"):
        assert found[1][1][name] == pytest.approx(found[0][1][name], rel=1e-4), name
    assert max(float(np.abs(a - b).max()) for a, b in zip(own, found[1][0], strict=True)) > 1e-3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nemotron: each expert a tensor of its own, beside Mamba layers, under a tower of clips and pictures."""
    folder = tmp_path_factory.mktemp("nemotron") / "mixture"
    write_hybrid(folder, pattern=MIXED, hidden=64)
    return folder


def test_nemotron_s_experts_are_shared_too(hybrid: Path, tmp_path: Path) -> None:
    with policy_of(hybrid) as policy:
        alone = nemotron_history(policy, hybrid, tmp_path / "alone")
    with policy_of(hybrid, SHARED) as policy:
        equal(nemotron_history(policy, hybrid, tmp_path / "together"), alone)
        assert checkpoint_shapes(tmp_path / "together" / "policy") == checkpoint_shapes(hybrid)
        policy.load(tmp_path / "alone")
        resumed = policy.train(nemotron_batch(hybrid))
    assert resumed["grad_norm"] == pytest.approx(alone.then["grad_norm"], rel=1e-4)


def test_nemotron_s_experts_in_bfloat16_are_those_of_ranks_that_hold_them_all(
    hybrid: Path, tmp_path: Path
) -> None:
    """Loss and gradient norm to 3 %, logprobs to 0.3 % of the largest. From one rank two are about that far away in
    bfloat16, whether they share experts or not: other micro-batches, other casts."""
    histories = []
    for name, layout in (("whole", {"dp": 2}), ("shared", SHARED)):
        with policy_of(hybrid, layout, dtype="bfloat16") as policy:
            found = nemotron_history(policy, hybrid, tmp_path / name)
        masters = dict(read_folder(tmp_path / name / "policy"))  # exports may round either way
        histories.append(dataclasses.replace(found, weights=masters))
    equal(histories[1], histories[0], rtol=3e-2)
