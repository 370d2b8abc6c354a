"""Nemotron 3 Nano Omni in AutoModel, with MLP and with expert layers: against plain transformers, and through its whole port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.tiny.hybrid import DENSE, MIXED, write_hybrid
from tests.integration.family_world import close_to
from tests.integration.nemotron_world import (
    CLIPS,
    TEMPERATURE,
    batch_for,
    both_ways,
    close_gradients,
    plain_logprobs,
)

pytestmark = pytest.mark.heavy

PATTERNS = {"dense": DENSE, "mixture": MIXED}
CONSTANT = {
    "vision_model.radio_model.summary_idxs",
    "vision_model.radio_model.input_conditioner.norm_mean",
    "vision_model.radio_model.input_conditioner.norm_std",
    "language_model.backbone.layers.2.mixer.gate.e_score_correction_bias",
}
"""What a checkpoint holds and training does not move."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("nemotron") / name for name in PATTERNS}
    for name, folder in made.items():
        write_hybrid(folder, pattern=PATTERNS[name], hidden=64)
    return made


@pytest.fixture(scope="module", params=PATTERNS)
def source(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def opened(
    source: Path, *, freeze: tuple[str, ...] = (), lr: float = 1e-3, **changes: Any
) -> AutoModelPolicy:
    trainer = TrainerConfig(
        optimizer=OptimizerConfig(lr=lr, warmup_steps=2), threads=1, micro_batch_tokens=300, **changes
    )
    return AutoModelPolicy(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE, freeze=freeze))


@pytest.fixture(scope="module")
def policy(source: Path) -> Iterator[AutoModelPolicy]:
    policy = opened(source)
    yield policy
    policy.close()


def weights_of(policy: AutoModelPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_comes_back_bit_for_bit_and_all_of_it_trains(
    policy: AutoModelPolicy, source: Path
) -> None:
    """The tower's query, key and value lie apart in the model, experts together, and constants nowhere."""
    stored = load_file(source / "model.safetensors")
    assert same(weights_of(policy), stored)
    assert policy.trainable_names() == set(stored) - CONSTANT
    assert any(".attn.qkv." in name for name in stored) and policy.encoder_trains


def test_logprobs_of_pictures_and_clips_equal_plain_transformers(
    policy: AutoModelPolicy, source: Path
) -> None:
    batch = batch_for(source)
    with torch.no_grad():
        expected = [plain_logprobs(policy._model, sample, batch) for sample in batch.samples]
    policy._vision.references = policy._vision.encoded = 0
    close_to(policy.logprobs(batch), expected, rtol=1e-5)
    assert policy._vision.references == 10 and policy._vision.encoded < 10


def test_steps_in_time_have_no_least(policy: AutoModelPolicy, source: Path) -> None:
    """As in engines; transformers cuts them off at a setting for first weights, which moves logprobs of the tiny model too."""
    from transformers import AutoModelForImageTextToText

    batch = batch_for(source)
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    mixers = [m for m in model.modules() if type(m).__name__ == "NemotronHMamba2Mixer"]
    ours = policy.logprobs(batch)
    with torch.no_grad():
        cut = [plain_logprobs(model, sample, batch) for sample in batch.samples]
        for mixer in mixers:
            assert mixer.time_step_limit == (0.001, float("inf")), "else the adapter need not set it"
            mixer.time_step_limit = (0.0, float("inf"))
        whole = [plain_logprobs(model, sample, batch) for sample in batch.samples]
    close_to(ours, whole, rtol=1e-5)
    assert mixers and any(not torch.equal(a, b) for a, b in zip(cut, whole, strict=True))


def test_one_tower_run_gives_the_naive_path_s_values_and_gradients(
    policy: AutoModelPolicy, source: Path
) -> None:
    """In float64, also where transformers would compute in float32, against every reference by itself."""
    batch = batch_for(source)
    text = policy._model.config.text_config
    grouped, text._experts_implementation = text._experts_implementation, "eager"  # torch groups no float64
    try:
        found = list(both_ways(policy, batch, plain_logprobs))
    finally:
        text._experts_implementation = grouped
    assert {name for name, _, _ in found} == {
        n for n, p in policy._model.named_parameters() if p.requires_grad
    }
    for name, gradient, expected in found:
        assert expected is not None, name
        assert float(expected.abs().max()) > 0 or "experts" in name, name
        close_gradients(gradient, expected)


def test_training_equals_plain_transformers(source: Path) -> None:
    """The same steps with every reference through transformers by itself: loss and gradient norm to 4 digits, then weights."""
    batch, results = batch_for(source), []

    for naive in (False, True):
        policy = opened(source)

        def forward(micro: MicroBatch, model: Any = policy._model) -> torch.Tensor:
            out = torch.zeros(micro.input_ids.shape)
            for i, row in enumerate(micro.rows):
                values = plain_logprobs(model, batch.samples[row], batch)
                out[i, micro.prompt_lengths[i] : micro.lengths[i]] = values
            return out[:, micro.first :]

        if naive:
            policy._forward = lambda _, forward=forward: forward  # type: ignore[method-assign]
        try:
            steps = [policy.train(batch) for _ in range(3)]
            results.append(([(s["loss"], s["grad_norm"]) for s in steps], weights_of(policy)))
            assert all((s["media_encoded"] > 0) != naive for s in steps)
        finally:
            policy.close()
    (ours, after), (theirs, expected) = results
    assert np.ravel(ours) == pytest.approx(np.ravel(theirs), rel=1e-4, abs=1e-5)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5)


def test_save_and_load_give_the_same_next_step(source: Path, tmp_path: Path) -> None:
    """Moments are stored by the checkpoint's names and shapes, also of what is cut or stacked in the model."""
    batch = batch_for(source)
    policy = opened(source)
    try:
        policy.train(batch)
        policy.save(tmp_path / "saved")
        at_save, expected = weights_of(policy), policy.train(batch)
        after = weights_of(policy)
    finally:
        policy.close()
    assert same(load_file(tmp_path / "saved" / "policy" / "model.safetensors"), at_save)
    moments = load_file(tmp_path / "saved" / "optimizer" / "moments.safetensors")
    shapes = {name: shape for name, shape in checkpoint_shapes(source).items() if name not in CONSTANT}
    assert {name: tuple(t.shape) for name, t in moments.items()} == {
        f"{moment}/{name}": shape for moment in ("exp_avg", "exp_avg_sq") for name, shape in shapes.items()
    }
    resumed = opened(source)
    try:
        resumed.load(tmp_path / "saved")
        metrics = resumed.train(batch)
        assert (metrics["loss"], metrics["grad_norm"]) == (expected["loss"], expected["grad_norm"])
        assert same(weights_of(resumed), after)
    finally:
        resumed.close()


def test_a_frozen_encoder_stays_and_its_media_are_encoded_once(folders: dict[str, Path]) -> None:
    """By the patterns of the clip recipes; the router too."""
    freeze = ("vision_model.*", "mlp1.*", "language_model.*.mixer.gate.*")
    policy = opened(folders["mixture"], freeze=freeze)
    try:
        before, batch = weights_of(policy), batch_for(folders["mixture"])
        policy.logprobs(batch)
        metrics = policy.train(batch)
        assert metrics["media_encoded"] == 0 and metrics["media_cached"] > 0 and not policy.encoder_trains
        for name, tensor in weights_of(policy).items():
            assert torch.equal(tensor, before[name]) == (name not in policy.trainable_names()), name
        assert "language_model.backbone.layers.2.mixer.experts.3.up_proj.weight" in policy.trainable_names()
    finally:
        policy.close()


def test_the_projector_alone_makes_features_that_go_stale(folders: dict[str, Path]) -> None:
    """By the pattern of the picture recipes: the tower is frozen, what is behind it is not."""
    policy = opened(folders["dense"], freeze=("vision_model.*",))
    try:
        batch = batch_for(folders["dense"])
        policy.logprobs(batch)
        assert policy.encoder_trains and policy.train(batch)["media_encoded"] > 0
        assert "mlp1.1.weight" in policy.trainable_names()
    finally:
        policy.close()


def test_some_experts_of_a_layer_cannot_be_frozen(folders: dict[str, Path]) -> None:
    with pytest.raises(OmnifleetError, match="name all or none") as caught:
        opened(folders["mixture"], freeze=("*.experts.[0-3].*",))
    assert caught.value.reason is Reason.INVALID_CONFIG and caught.value.knob == "model.freeze"


@pytest.mark.parametrize("changes", [{"logprob_chunk": 5}, {"recompute": True}], ids=["chunks", "recompute"])
def test_chunks_and_recomputing_change_no_number(folders: dict[str, Path], changes: dict[str, Any]) -> None:
    source = folders["mixture"]
    batch, results = batch_for(source), []
    for settings in ({}, changes):
        policy = opened(source, **settings)
        try:
            logprobs, step = policy.logprobs(batch), policy.train(batch)
            results.append((logprobs, step["loss"], step["grad_norm"]))
        finally:
            policy.close()
    close_to(results[1][0], results[0][0], rtol=1e-5)
    assert results[1][1:] == pytest.approx(results[0][1:], rel=1e-4, abs=1e-6)


def test_bfloat16_is_near_float32(policy: AutoModelPolicy, source: Path) -> None:
    """Within 0.05 of a logprob (1 % of -5); as in plain transformers whose weights are bfloat16 altogether."""
    batch = batch_for(source)
    exact = policy.logprobs(batch)
    half = opened(source, dtype="bfloat16")
    try:
        gaps = [np.abs(a - b).max() for a, b in zip(half.logprobs(batch), exact, strict=True)]
        assert 0 < max(gaps) < 0.05
        assert np.isfinite(half.train(batch)["grad_norm"])
        kinds = {name: tensor.dtype for name, tensor in half.export()}
        assert {kinds[name] for name in half.trainable_names()} == {torch.bfloat16}
        assert all(kinds[name] != torch.bfloat16 for name in CONSTANT & kinds.keys()), "no weights: as stored"
    finally:
        half.close()


def test_a_scan_under_autocast_is_float32(policy: AutoModelPolicy) -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h as layers

    random = torch.Generator().manual_seed(0)
    x, dt, b, c = (torch.randn(1, 70, *s, generator=random) for s in ((4, 8), (4,), (2, 16), (2, 16)))
    settings = {"chunk_size": 64, "dt_softplus": True}
    alone = layers.mamba2_chunk_scan(x, dt, -torch.ones(4), b, c, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layers.mamba2_chunk_scan(x, dt, -torch.ones(4), b, c, **settings), alone)


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({"video_target_num_patches": 16}, [2, 2, 4]),
        ({"video_target_num_patches": 64}, [2, 6, 10]),
        ({"video_target_num_patches": 64, "video_maintain_aspect_ratio": False}, [2, 8, 8]),
    ],
)
def test_clips_of_any_size_that_the_recipe_asks_for_are_trained_on(
    policy: AutoModelPolicy, source: Path, changes: dict[str, bool | int], grid: list[int]
) -> None:
    batch = batch_for(source, clips=changes)
    assert batch.segments[Digest("v")]["video_grid_thw"].tolist() == [grid], "48 x 90 pixels, 3 frames"
    sample = batch.samples[3]
    with torch.no_grad():
        expected = plain_logprobs(policy._model, sample, batch)
    close_to(policy.logprobs(StepBatch([sample], 0, batch.segments)), [expected], rtol=1e-5)


def test_a_clip_cut_for_another_model_is_refused(policy: AutoModelPolicy, source: Path) -> None:
    """Of four frames a moment, where this model's projection takes two."""
    batch = batch_for(source, clips={**CLIPS, "temporal_patch_size": 4})
    sample = batch.samples[3]
    with pytest.raises(OmnifleetError, match="3 frames in 1 moments") as caught:
        policy.logprobs(StepBatch([sample], 0, batch.segments))
    assert caught.value.reason is Reason.INVALID_REQUEST
