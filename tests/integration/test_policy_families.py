"""Each family in AutoModel: pictures and clips, each through the tower once, against plain transformers."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from omnifleet.cli.run import resolve_model
from omnifleet.config import load_recipe
from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.families import FAMILIES, PROCESSORS, Family, known_family
from tests.integration.family_world import TEMPERATURE, batch_for, close_to, plain_logprobs

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    name: Family = request.param
    return name


@pytest.fixture(scope="module")
def source(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    write_checkpoint(folder, family=family, hidden=64)
    return folder


@pytest.fixture(scope="module")
def policy(source: Path) -> Iterator[AutoModelPolicy]:
    trainer = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3), threads=1, micro_batch_tokens=150)
    policy = AutoModelPolicy(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE))
    yield policy
    policy.close()


def test_a_tiny_checkpoint_has_its_family_s_processor_and_names(
    policy: AutoModelPolicy, source: Path, family: Family
) -> None:
    processor = AutoProcessor.from_pretrained(source)
    assert type(processor).__name__ == PROCESSORS[family][0]
    assert type(processor.video_processor).__name__ == PROCESSORS[family][1]
    assert {name: tuple(tensor.shape) for name, tensor in policy.export()} == checkpoint_shapes(source)


def test_logprobs_of_pictures_and_clips_equal_plain_transformers(
    policy: AutoModelPolicy, source: Path
) -> None:
    batch = batch_for(source)
    with torch.no_grad():
        expected = [plain_logprobs(policy._model, sample, batch) for sample in batch.samples]
    close_to(policy.logprobs(batch), expected, rtol=1e-5)


def test_one_tower_run_gives_the_naive_path_s_values_and_gradients(
    policy: AutoModelPolicy, source: Path
) -> None:
    """In float64, against pixels for every reference through the whole model."""
    batch = batch_for(source)
    weights = dict(policy._model.named_parameters())
    policy._model.double()
    try:
        policy._model.zero_grad()
        policy._vision.references = policy._vision.encoded = 0
        ours = torch.zeros((), dtype=torch.float64)
        for micro in policy._collate(batch, range(len(batch.samples))):
            ours = ours + (policy._forward(batch)(micro) * micro.token_mask[:, micro.first :]).sum()
        torch.autograd.backward(ours)
        assert policy._vision.references == 10 and policy._vision.encoded < 10
        gradients = {name: p.grad.clone() for name, p in weights.items() if p.grad is not None}
        policy._model.zero_grad()
        naive = torch.stack([plain_logprobs(policy._model, s, batch).sum() for s in batch.samples]).sum()
        torch.autograd.backward(naive)
        torch.testing.assert_close(ours, naive, rtol=1e-6, atol=0)
        assert gradients.keys() == {name for name, p in weights.items() if p.grad is not None}
        assert any("visual" in name for name in gradients)
        for name, gradient in gradients.items():
            expected = weights[name].grad
            assert expected is not None
            scale = float(expected.abs().max())
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * scale + 1e-12)
    finally:
        policy._model.zero_grad()
        policy._model.float()


def test_media_in_another_order_than_the_prompt_s_are_refused(policy: AutoModelPolicy, source: Path) -> None:
    batch = batch_for(source)
    sample = batch.samples[3]
    turned = dataclasses.replace(sample, segment_keys=sample.segment_keys[::-1], media=sample.media[::-1])
    with pytest.raises(OmnifleetError, match="order of its media"):
        policy.logprobs(StepBatch([turned], 0, batch.segments))


def test_a_media_token_that_the_model_wrote_is_text(policy: AutoModelPolicy, source: Path) -> None:
    """It has no features, and it does not train."""
    batch = batch_for(source)
    contract = policy._vision.contract
    assert contract is not None and contract.video_token is not None
    batch.samples[0].token_ids[1:3] = [contract.image_token, contract.video_token]
    (values,) = policy.logprobs(StepBatch(batch.samples[:1], 0, batch.segments))
    assert np.isfinite(values).all()
    (micro,) = policy._collate(batch, [0])
    start = micro.prompt_lengths[0]
    assert micro.token_mask[0, start : start + 4].tolist() == [1, 0, 0, 1]


def test_a_family_without_lessons_has_no_warm_start() -> None:
    assert known_family("qwen3_vl", warm=False) == "qwen3_vl"
    with pytest.raises(OmnifleetError, match="qwen2_5_vl") as refused:
        known_family("qwen3_vl", warm=True)
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "model.family"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "qwen2_vl"),
        (("model.family=qwen2_5_vl",), "qwen2_5_vl"),
        (("trainer.backend=megatron",), "qwen2_5_vl"),
        (("model.family=nemotron_omni",), "nemotron_omni"),
    ],
)
def test_the_tiny_model_is_of_a_family_that_the_backend_knows(
    overrides: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def make(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "/made\n", "")

    monkeypatch.setattr(subprocess, "run", make)
    assert resolve_model("cpu-tiny", list(overrides)).model.path == "/made"
    assert asked[0][asked[0].index("--family") + 1] == expected
    assert ("--no-warm-start" in asked[0]) == (expected == "nemotron_omni"), "no lesson exists for it"


def test_a_recipe_that_megatron_cannot_train_is_refused_as_a_recipe() -> None:
    override = "model.family=qwen2_vl"
    load_recipe("cpu-tiny", [override])
    with pytest.raises(OmnifleetError, match=r"set model\.family = qwen2_5_vl"):
        load_recipe("cpu-tiny", ["trainer.backend=megatron", override])
