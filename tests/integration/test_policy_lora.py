"""Adapters beside fixed weights: what trains, what engines get, what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omnifleet.config.recipe import Recipe, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from tests.integration.family_world import batch_for, close_to, plain_logprobs
from tests.integration.rank_world import equal, history, opened, weights_of

pytestmark = pytest.mark.heavy
LORA = {"targets": ["*language_model*q_proj", "*language_model*.down_proj"], "rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "model"
    write_checkpoint(folder, family="qwen2_vl", hidden=64)
    return folder


def adapted(source: Path, parallel: dict[str, Any] | None = None, **changes: Any) -> Policy:
    return opened(source, parallel, lora=LORA | changes)


def test_only_adapters_train_and_engines_get_the_sums(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    batch, stored = batch_for(source), load_file(source / "model.safetensors")
    policy = adapted(source)
    try:
        before = weights_of(policy)
        assert before.keys() == stored.keys()
        assert all(torch.equal(before[name], stored[name]) for name in stored)  # B is 0
        assert not policy.encoder_trains
        for _ in range(2):
            policy.train(batch)
        after, logprobs = weights_of(policy), policy.logprobs(batch)
        moved = {name for name in stored if not torch.equal(after[name], stored[name])}
        assert moved == policy.trainable_names()
        assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"}
        policy.save(tmp_path)
        expected = policy.train(batch)
    finally:
        policy.close()
    served = AutoModelForImageTextToText.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    with torch.no_grad():
        close_to(logprobs, [plain_logprobs(served, one, batch).numpy() for one in batch.samples], rtol=1e-5)
    resumed = adapted(source)
    try:
        resumed.load(tmp_path)
        again = resumed.train(batch)
        assert again["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert again["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    finally:
        resumed.close()
    wider = adapted(source, rank=8)
    try:
        with pytest.raises(OmnifleetError, match="other adapters") as refused:
            wider.load(tmp_path)
        assert refused.value.reason is Reason.CORRUPT
    finally:
        wider.close()


def test_a_target_without_a_match_names_its_neighbours(source: Path) -> None:
    with pytest.raises(OmnifleetError, match="q_proj") as refused:
        adapted(source, targets=["*.qproj", "*language_model*q_proj"])
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.lora.targets"


def test_adapters_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="needs backend = automodel"):
        TrainerConfig.model_validate({"backend": "megatron", "lora": {}})
    body = {
        "run": {"name": "r"},
        "model": {"path": "tiny", "freeze": ["visual.*"]},
        "reward": [{"name": "format"}],
    }
    with pytest.raises(ValueError, match=r"leave model\.freeze out"):
        Recipe.model_validate(body | {"trainer": {"lora": {}}})


@pytest.mark.soak
def test_two_ranks_train_adapters_as_one(source: Path) -> None:
    histories = []
    for parallel in (None, {"dp": 2}):
        policy = adapted(source, parallel)
        try:
            histories.append(history(policy, source))
        finally:
            policy.close()
    equal(histories[1], histories[0])
