"""The AutoModel policy on CPU, on a tiny Qwen2-VL: against plain transformers, and through its whole port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from omnifleet.address import token_digest
from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, Recipe, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.objectives.logprobs import token_logprobs
from omnifleet_trainer.policy import automodel
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.build import open_policy
from omnifleet_trainer.policy.folder import write_folder
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.integration.batch_sample import ith_sample

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def image_token(source: Path) -> int:
    return int(json.loads((source / "config.json").read_text())["image_token_id"])


def open_tiny(
    source: Path, *, freeze: tuple[str, ...] = (), lr: float = 1e-3, **settings: Any
) -> AutoModelPolicy:
    objective = settings.pop("objective", ObjectiveConfig())
    trainer = TrainerConfig(optimizer=OptimizerConfig(lr=lr), threads=1, **settings)
    return AutoModelPolicy(Job(source, trainer, objective, temperature=0.7, freeze=freeze))


@pytest.fixture
def policy(source: Path) -> Iterator[AutoModelPolicy]:
    policy = open_tiny(source)
    yield policy
    policy.close()


def batch_of(image_token: int, *, samples: int = 6, seed: int = 0) -> StepBatch:
    """Samples of several lengths; three pictures of two sizes, shared and repeated; the last sample has none."""
    random = np.random.default_rng(seed)
    grids = {"a": (1, 4, 4), "b": (1, 4, 6), "c": (1, 4, 4)}
    segments = {
        Digest(key): {
            "pixel_values": random.standard_normal((int(np.prod(grid)), 1176)).astype(np.float32),
            "image_grid_thw": np.array([grid]),
        }
        for key, grid in grids.items()
    }
    made = []
    for i in range(samples):
        keys = "" if i == samples - 1 else ["a", "ab", "bca", "a"][i % 4]
        prompt = [10 + i]
        for key in keys:
            prompt += [362, *[image_token] * (int(np.prod(grids[key])) // 4), 363]
        prompt += random.integers(0, 300, 3 + i).tolist()
        reply = random.integers(0, 300, 4 + 2 * (i % 3)).tolist()
        made.append(ith_sample(i, prompt, reply, [(MediaKind.IMAGE, key) for key in keys]))
    return StepBatch(made, 0, segments)


def on_policy(policy: AutoModelPolicy, batch: StepBatch) -> StepBatch:
    for sample, values in zip(batch.samples, policy.logprobs(batch), strict=True):
        sample.generation_logprobs = values.tolist()
    return batch


def plain_logprobs(model: Any, sample: TrainingSample, batch: StepBatch, image_token: int) -> torch.Tensor:
    """One sample through transformers as its documentation says: no padding, no sharing, pixels for each picture."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sample.segment_keys:
        segments = [batch.segments[key] for key in sample.segment_keys]
        arguments["pixel_values"] = torch.from_numpy(np.concatenate([s["pixel_values"] for s in segments]))
        arguments["image_grid_thw"] = torch.from_numpy(
            np.concatenate([s["image_grid_thw"] for s in segments])
        )
        arguments["mm_token_type_ids"] = (ids == image_token).int()
    with torch.no_grad():
        logits = model(**arguments).logits
    start = len(sample.prompt_token_ids)
    return token_logprobs(logits[:, start - 1 : -1], ids[:, start:], temperature=0.7)[0]


def weights_of(policy: AutoModelPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def test_grp_16_logprobs_equal_plain_transformers_in_every_layout(
    policy: AutoModelPolicy, source: Path, image_token: int
) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    batch = batch_of(image_token)
    values = policy.logprobs(batch)
    policy._trainer = policy._trainer.model_copy(update={"micro_batch_tokens": 64})
    narrow = policy.logprobs(batch)
    for sample, ours, cut in zip(batch.samples, values, narrow, strict=True):
        expected = plain_logprobs(model, sample, batch, image_token).numpy()
        np.testing.assert_allclose(ours, expected, atol=1e-4)
        np.testing.assert_allclose(cut, expected, atol=1e-4)


def test_one_tower_run_for_all_references_gives_the_same_gradients(source: Path, image_token: int) -> None:
    """Against a batch in which every picture has a key of its own, in float64."""
    shared = batch_of(image_token)
    copies: dict[Digest, Any] = {}
    distinct = batch_of(image_token)
    for i, sample in enumerate(distinct.samples):
        keys = tuple(Digest(f"{key}-{i}-{j}") for j, key in enumerate(sample.segment_keys))
        copies |= {new: shared.segments[old] for new, old in zip(keys, sample.segment_keys, strict=True)}
        sample.segment_keys = keys
    naive = StepBatch(distinct.samples, 0, copies)
    policy = open_tiny(source)
    try:
        policy._model.double()
        results = []
        for batch in (shared, naive):
            metrics: dict[str, float] = {}
            gradients: dict[str, torch.Tensor] = {}

            def keep(into: dict[str, torch.Tensor] = gradients) -> float:
                into.update({n: p.grad.clone() for n, p in policy._trainable.items() if p.grad is not None})
                policy._optimizer.clear()
                return 1.0

            policy._update = keep  # type: ignore[method-assign]
            metrics = policy.train(batch)
            results.append((metrics, gradients))
        (one, ours), (other, theirs) = results
        assert one["media_references"] == other["media_references"] == 8
        assert one["media_encoded"] == 3 and other["media_encoded"] == 8
        assert any("visual" in name for name in ours)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], atol=1e-9, rtol=1e-7)
    finally:
        policy.close()


def test_a_step_moves_probability_towards_what_was_better(policy: AutoModelPolicy, image_token: int) -> None:
    batch = on_policy(policy, batch_of(image_token))
    metrics = policy.train(batch)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["probs_ratio"] == 1.0 and metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["lr"] == 1e-3 and metrics["updates"] == 1 and metrics["lag/0"] == 1.0
    gains = [
        float(after.sum() - sum(sample.generation_logprobs))
        for after, sample in zip(policy.logprobs(batch), batch.samples, strict=True)
    ]
    assert all(gain * sample.advantage > 0 for gain, sample in zip(gains, batch.samples, strict=True))


def test_micro_batches_do_not_change_the_step(source: Path, image_token: int) -> None:
    results = []
    for tokens in (64, 16384):
        policy = open_tiny(source, micro_batch_tokens=tokens)
        try:
            metrics = policy.train(on_policy(policy, batch_of(image_token)))
            results.append((metrics["loss"], metrics["grad_norm"]))
        finally:
            policy.close()
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_several_updates_a_step_use_logprobs_from_before_the_first(source: Path, image_token: int) -> None:
    policy = open_tiny(source, batch_samples=2, prompts_per_step=1, generations_per_prompt=6)
    try:
        metrics = policy.train(on_policy(policy, batch_of(image_token)))
        assert metrics["updates"] == 3
        assert metrics["probs_ratio_max"] > 1.0  # later updates are off-policy
        assert metrics["token_mult_prob_error"] == pytest.approx(
            1.0, abs=1e-5
        )  # prev still equals generation
    finally:
        policy.close()


def test_frozen_weights_stay_and_their_pictures_are_encoded_once(source: Path, image_token: int) -> None:
    policy = open_tiny(source, freeze=("visual.*",))
    try:
        assert not policy.encoder_trains
        assert not any(name.startswith("visual.") for name in policy.trainable_names())
        before, batch = weights_of(policy), on_policy(policy, batch_of(image_token))
        first, second = policy.train(batch), policy.train(batch)
        assert (
            first["media_encoded"] == 0 and second["media_cached"] == 3
        )  # the logprob pass filled the cache
        after = weights_of(policy)
        for name in before:
            assert torch.equal(before[name], after[name]) == (name not in policy.trainable_names()), name
    finally:
        policy.close()


def test_a_freeze_pattern_without_a_match_names_its_neighbours(source: Path) -> None:
    with pytest.raises(OmnifleetError, match=r"visual\.") as caught:
        open_tiny(source, freeze=("visaul.*",))
    assert caught.value.reason is Reason.INVALID_CONFIG and caught.value.knob == "model.freeze"


def test_export_and_save_hold_the_checkpoint_s_own_names(
    policy: AutoModelPolicy, source: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    shapes = checkpoint_shapes(source)
    assert {name: tuple(tensor.shape) for name, tensor in policy.export()} == shapes
    policy.save(tmp_path)
    assert (tmp_path / "policy" / "tokenizer.json").exists()
    assert (tmp_path / "policy" / "preprocessor_config.json").exists()
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_save_and_load_give_the_same_next_step(source: Path, image_token: int, tmp_path: Path) -> None:
    policy = open_tiny(source)
    try:
        batch = on_policy(policy, batch_of(image_token))
        policy.train(batch)
        policy.save(tmp_path)
        expected = policy.train(batch)
        expected_weights = weights_of(policy)
    finally:
        policy.close()
    resumed = open_tiny(source)
    try:
        resumed.load(tmp_path)
        metrics = resumed.train(batch)
        assert metrics["loss"] == expected["loss"] and metrics["grad_norm"] == expected["grad_norm"]
        for name, tensor in weights_of(resumed).items():
            assert torch.equal(tensor, expected_weights[name])
    finally:
        resumed.close()


def test_loading_another_model_is_corrupt(policy: AutoModelPolicy, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "policy", hidden=64)
    with pytest.raises(OmnifleetError) as caught:
        policy.load(tmp_path)
    assert caught.value.reason is Reason.CORRUPT


def test_learning_rate_zero_moves_nothing(source: Path, image_token: int) -> None:
    policy = open_tiny(source, lr=0.0)
    try:
        before = weights_of(policy)
        policy.train(batch_of(image_token))
        assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(policy).items())
    finally:
        policy.close()


def test_a_refused_sample_leaves_the_weights_alone(policy: AutoModelPolicy, image_token: int) -> None:
    batch, before = batch_of(image_token), weights_of(policy)
    batch.samples[3].prompt_hash = token_digest([1])
    with pytest.raises(OmnifleetError, match="hash"):
        policy.train(batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(policy).items())


def test_a_step_without_a_trained_token_moves_nothing(policy: AutoModelPolicy, image_token: int) -> None:
    batch, before = batch_of(image_token), weights_of(policy)
    for sample in batch.samples:
        sample.valid = False
    metrics = policy.train(batch)
    assert metrics["skipped_updates"] == 1 and metrics["updates"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(policy).items())


def test_kl_pulls_back_to_where_the_run_began(source: Path, image_token: int) -> None:
    objective = ObjectiveConfig(kl_coefficient=0.5)
    policy = open_tiny(source, objective=objective)
    try:
        batch = on_policy(policy, batch_of(image_token))
        first = policy.train(batch)
        second = policy.train(on_policy(policy, batch))
        assert first["kl_penalty"] == pytest.approx(0.0, abs=1e-6)
        assert second["kl_penalty"] > 1e-5
    finally:
        policy.close()


def test_sequence_errors_mask_samples(source: Path, image_token: int) -> None:
    policy = open_tiny(source, objective=ObjectiveConfig(sequence_error_threshold=2.0))
    try:
        batch = on_policy(policy, batch_of(image_token))
        batch.samples[0].generation_logprobs = [v - 3 for v in batch.samples[0].generation_logprobs]
        metrics = policy.train(batch)
        assert metrics["num_masked_seqs_by_logprob_error"] == 1
        assert metrics["num_valid_samples"] == len(batch.samples) - 1
    finally:
        policy.close()


def test_bfloat16_compute_keeps_float32_masters(source: Path, image_token: int) -> None:
    """Against float32 on one rank, where AutoModel has no FSDP2 and so no mixed precision: loss and gradient norm to 3 %."""
    batch, steps = batch_of(image_token), {}
    for dtype in ("float32", "bfloat16"):
        policy = open_tiny(source, dtype=dtype)
        try:
            if dtype == "float32":
                batch = on_policy(policy, batch)
            steps[dtype] = policy.train(batch)
            assert {tensor.dtype for _, tensor in policy.export()} == {getattr(torch, dtype)}
            assert {tensor.dtype for _, tensor in policy._state()} == {torch.float32}
        finally:
            policy.close()
    exact, rounded = steps["float32"], steps["bfloat16"]
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=3e-2)
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=3e-2, abs=3e-3)
    assert exact["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert 1.0001 < rounded["token_mult_prob_error"] < 1.05, "else it computed in float32"


def test_the_class_is_transformers_where_automodel_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoModel's own follow the environment in what they compute with; and what is saved is the checkpoint's config, to the
    byte, with what transformers would not write."""
    from nemo_automodel import NeMoAutoModelForImageTextToText

    asked: list[dict[str, Any]] = []
    make = NeMoAutoModelForImageTextToText.from_pretrained

    def watched(*args: Any, **settings: Any) -> Any:
        asked.append(settings)
        return make(*args, **settings)

    monkeypatch.setattr(NeMoAutoModelForImageTextToText, "from_pretrained", watched)
    write_mixture(tmp_path / "model", hidden=64, layers=1)
    policy = open_tiny(tmp_path / "model")
    try:
        assert [settings["force_hf"] for settings in asked] == [True]
        assert type(policy._model).__module__.startswith("transformers.models.qwen3_vl_moe")
        policy.save(tmp_path / "saved")
    finally:
        policy.close()
    config = (tmp_path / "saved" / "policy" / "config.json").read_bytes()
    assert config == (tmp_path / "model" / "config.json").read_bytes()
    assert json.loads(config)["text_config"]["norm_topk_prob"] is True


def test_offload_and_onload_go_round(policy: AutoModelPolicy, image_token: int) -> None:
    batch = batch_of(image_token)
    policy.train(batch)
    before = policy.logprobs(batch)
    policy.offload()
    policy.onload()
    for ours, again in zip(before, policy.logprobs(batch), strict=True):
        np.testing.assert_array_equal(ours, again)


def test_shards_and_index_are_what_transformers_reads(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    whole = load_file(source / "model.safetensors")
    write_folder(tmp_path, whole.items(), source, shard_bytes=500_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert checkpoint_shapes(tmp_path) == checkpoint_shapes(source)
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]


def test_a_policy_that_does_not_open_leaves_no_group_behind(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later policy of several ranks finds this process taken."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(automodel, "build", fail)
    before = dist.is_initialized()
    with pytest.raises(RuntimeError, match="no memory"):
        open_tiny(source)
    assert dist.is_initialized() == before


def test_recipes_that_cannot_train_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    base = {"run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}]}
    greedy = Recipe.model_validate(base | {"sampling": {"temperature": 0}})
    with pytest.raises(OmnifleetError, match="greedy"):
        open_policy(greedy, tmp_path)
    with pytest.raises(OmnifleetError) as caught:
        open_policy(Recipe.model_validate(base), tmp_path)
    assert caught.value.reason is Reason.MODEL_MISSING


def test_recomputing_layers_changes_no_number(source: Path, image_token: int) -> None:
    results = []
    for recompute in (False, True):
        policy = open_tiny(source, recompute=recompute)
        try:
            metrics = policy.train(on_policy(policy, batch_of(image_token)))
            results.append((metrics["loss"], metrics["grad_norm"]))
        finally:
            policy.close()
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_a_bfloat16_checkpoint_gets_float32_masters(source: Path, tmp_path: Path) -> None:
    """AutoModel 0.6 kept bfloat16 ones, or loaded nothing; the compatibility room refuses it."""
    half = {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()
    }
    write_folder(tmp_path, half.items(), source)
    policy = open_tiny(tmp_path)
    try:
        found = dict(policy._state())
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in half.items())
    finally:
        policy.close()


def test_a_version_that_was_not_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnifleet_trainer.compat import automodel

    monkeypatch.setattr(automodel, "VERSIONS", ("9.",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OmnifleetError, match="not checked") as refused:
        automodel.install()
    assert refused.value.reason is Reason.UNSUPPORTED
