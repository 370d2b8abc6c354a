"""The Megatron policy on one CPU rank: equal to plain transformers and to AutoModel, and through its whole port."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, Recipe, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.report.records import read_run
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.compat import megatron as compat
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.build import open_policy
from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.policy.megatron import MegatronPolicy
from omnifleet_trainer.policy.packing import Packing
from omnifleet_trainer.policy.passes import OneByOne
from omnifleet_trainer.policy.step import train_step
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.integration.family_world import TEMPERATURE, batch_for, close_to, plain_logprobs
from tests.support_run import CliRun

pytestmark = pytest.mark.heavy

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
MIXTURE = "qwen3_vl_moe"
DECAY = 0.01


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("megatron") / name for name in FAMILIES}
    write_checkpoint(made["qwen2_5_vl"], family="qwen2_5_vl")
    write_checkpoint(made["qwen3_vl"], family="qwen3_vl")
    made[MIXTURE] = tmp_path_factory.mktemp("megatron") / MIXTURE
    write_mixture(made[MIXTURE])
    return made


@pytest.fixture
def source(folders: dict[str, Path]) -> Path:
    return folders["qwen2_5_vl"]


def job(
    source: Path,
    backend: Any,
    *,
    lr: float = 1e-3,
    objective: ObjectiveConfig | None = None,
    freeze: tuple[str, ...] = (),
    **changes: Any,
) -> Job:
    optimizer = OptimizerConfig(lr=lr, weight_decay=DECAY, warmup_steps=2)
    trainer = TrainerConfig(backend=backend, optimizer=optimizer, threads=1, **changes)
    return Job(source, trainer, objective or ObjectiveConfig(), temperature=TEMPERATURE, freeze=freeze)


def opened(source: Path, **changes: Any) -> MegatronPolicy:
    return MegatronPolicy(job(source, "megatron", **changes))


@pytest.fixture
def policy(source: Path) -> Iterator[MegatronPolicy]:
    policy = opened(source)
    yield policy
    policy.close()


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("packing", "chunk"), [(True, None), (False, None), (True, 4)])
def test_only_what_predicts_replies_is_multiplied_by_the_vocabulary(
    source: Path, packing: bool, chunk: int | None
) -> None:
    policy, batch, rows = opened(source, packing=packing, logprob_chunk=chunk), batch_for(source), []

    def seen(head: Any, _: Any, output: tuple[Any, ...]) -> None:
        if output[0].shape[-1] == len(head.weight):
            rows.append(output[0][..., 0].numel())

    try:
        policy._family.head.register_forward_hook(seen)
        policy.logprobs(batch)
    finally:
        policy.close()
    assert chunk is None or max(rows) == chunk
    first = min(len(sample.prompt_token_ids) for sample in batch.samples)
    ends = [sample.length - first for sample in batch.samples]
    assert sum(rows) == (sum(ends) if packing else len(ends) * max(ends)), "none before the first reply's"


def plain_training(source: Path, batch: StepBatch, steps: int) -> tuple[list[Any], list[tuple[float, float]]]:
    """Logprobs, then (loss, gradient norm) of each step: transformers, torch's AdamW, pixels for every reference."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)

    def forward(micro: MicroBatch) -> torch.Tensor:
        out = torch.zeros(micro.input_ids.shape)
        for i, row in enumerate(micro.rows):
            values = plain_logprobs(model, batch.samples[row], batch)
            out[i, micro.prompt_lengths[i] : micro.lengths[i]] = values
        return out[:, micro.first :]

    def update() -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        adam.step()
        adam.zero_grad()
        return norm

    from omnifleet_trainer.batch.collate import collate
    from omnifleet_trainer.policy.families.qwen import media_contract

    micros = collate(
        batch,
        range(len(batch.samples)),
        micro_batch_tokens=150,
        contract=media_contract(model.config),
    )
    with torch.no_grad():
        before = [plain_logprobs(model, sample, batch).numpy() for sample in batch.samples]
    rows = []
    for step in range(steps):
        adam.param_groups[0]["lr"] = 1e-3 * (0.1 + 0.9 * min(step / 2, 1))
        metrics = train_step(
            batch, [micros], objective=ObjectiveConfig(), schedule=OneByOne(forward), update=update
        )
        rows.append((metrics["loss"], metrics["grad_norm"]))
    return before, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_both_backends_and_plain_transformers_train_alike(folders: dict[str, Path], family: str) -> None:
    """One checkpoint and batch, with clips: logprobs, then loss and gradient norm to 4 digits over 3 steps."""
    source = folders[family]
    batch = batch_for(source)
    expected, plain = plain_training(source, batch, 3)
    work = []
    for backend in ("megatron", "automodel"):
        policy = open_rank(job(source, backend, micro_batch_tokens=150, peak_tflops=0.1), ALONE)
        try:
            close_to(policy.logprobs(batch), expected, rtol=1e-5)
            rows = [policy.train(batch) for _ in range(3)]
        finally:
            policy.close()
        assert [row["media_references"] for row in rows] == [10, 10, 10]
        assert all(row["media_encoded"] < 10 for row in rows)
        for row, (loss, norm) in zip(rows, plain, strict=True):
            assert row["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
            assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
        work.append([row["mfu"] * row["train_seconds"] for row in rows])
    # A pack takes more samples than a padded batch, so its tower runs for fewer references.
    assert all(0 < packed <= padded for packed, padded in zip(*work, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, MIXTURE])
def test_a_checkpoint_comes_back_bit_for_bit_and_all_of_it_trains(
    folders: dict[str, Path], family: str
) -> None:
    """No part is frozen by default, no name is lost, the vocabulary is not padded."""
    policy = opened(folders[family])
    try:
        stored = load_file(folders[family] / "model.safetensors")
        assert same(weights_of(policy), stored)
        assert policy.trainable_names() == set(stored)
        assert policy.encoder_trains
        head = policy._built.core.language_model.output_layer.weight
        assert head.shape[0] == policy._built.config.text_config.vocab_size
    finally:
        policy.close()


def test_a_mixture_gives_the_logprobs_of_plain_transformers(folders: dict[str, Path]) -> None:
    """Its provider freezes language and vision unless told not to, and balances experts by losses of its own."""
    from transformers import AutoModelForImageTextToText

    batch = batch_for(folders[MIXTURE])
    model = AutoModelForImageTextToText.from_pretrained(folders[MIXTURE], dtype=torch.float32)
    with torch.no_grad():
        expected = [plain_logprobs(model, sample, batch).numpy() for sample in batch.samples]
    policy = opened(folders[MIXTURE])
    try:
        close_to(policy.logprobs(batch), expected, rtol=1e-5)
    finally:
        policy.close()


@pytest.mark.parametrize(
    "changes",
    [{"packing": False}, {"recompute": True}, {"logprob_chunk": 4}, {"logprob_chunk": 3, "packing": False}],
)
def test_padding_recomputing_and_chunks_change_no_number(source: Path, changes: dict[str, Any]) -> None:
    batch, results = batch_for(source), []
    for settings in ({}, changes):
        policy = opened(source, **settings)
        try:
            logprobs = policy.logprobs(batch)
            steps = [policy.train(batch) for _ in range(2)]
            results.append((logprobs, [(step["loss"], step["grad_norm"]) for step in steps]))
        finally:
            policy.close()
    close_to(results[1][0], results[0][0], rtol=1e-5)
    assert np.ravel(results[1][1]) == pytest.approx(np.ravel(results[0][1]), rel=1e-4)


def test_optimiser_state_moves_between_backends(source: Path, tmp_path: Path) -> None:
    """It is by the checkpoint's names: the step after a checkpoint is the same in either."""
    batch = batch_for(source)
    policy = opened(source)
    try:
        policy.train(batch)
        policy.save(tmp_path / "saved")
        expected = policy.train(batch)
        after = weights_of(policy)
    finally:
        policy.close()
    other = AutoModelPolicy(job(source, "automodel"))
    try:
        other.load(tmp_path / "saved")
        assert other.train(batch)["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for name, tensor in other.export():
            torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-5)
        other.load(tmp_path / "saved")
        other.save(tmp_path / "again")
    finally:
        other.close()
    resumed = opened(source)
    try:
        resumed.load(tmp_path / "again")
        assert resumed.train(batch)["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    finally:
        resumed.close()


def test_attention_is_told_all_tokens_of_a_pack(policy: MegatronPolicy, source: Path) -> None:
    """Without their number state leaks from row to row in hybrid models, silently."""
    batch = batch_for(source)
    for micro in policy._collate(batch, range(len(batch.samples))):
        told = Packing(micro).parameters()
        assert told.total_tokens == sum(micro.lengths) == int(told.cu_seqlens_q[-1])
        assert told.max_seqlen_q == max(micro.lengths) and told.qkv_format == "thd"


def test_bridge_still_needs_the_merger_s_activation(folders: dict[str, Path]) -> None:
    """A tripwire: once Bridge takes the exact function itself, `use_exact_gelu` can go."""
    policy = opened(folders["qwen3_vl"])
    try:
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import Qwen3VLVisionPatchMerger

        tower = policy._built.core.vision_model
        assert tower.config.activation_func is not torch.nn.functional.gelu
        mergers = [part for part in tower.modules() if isinstance(part, Qwen3VLVisionPatchMerger)]
        assert len(mergers) == 2
        assert all(merger.activation_func is torch.nn.functional.gelu for merger in mergers)
    finally:
        policy.close()


def test_save_and_load_give_the_same_next_step(source: Path, tmp_path: Path) -> None:
    batch = batch_for(source)
    policy = opened(source)
    try:
        policy.train(batch)
        write = policy.snapshot()
        policy.save(tmp_path / "saved")
        at_save = weights_of(policy)
        expected = policy.train(batch)
        after = weights_of(policy)
        write(tmp_path / "snapshot")
    finally:
        policy.close()
    for name in ("saved", "snapshot"):
        assert same(load_file(tmp_path / name / "policy" / "model.safetensors"), at_save)
    resumed = opened(source)
    try:
        resumed.load(tmp_path / "snapshot")
        metrics = resumed.train(batch)
        assert (metrics["loss"], metrics["grad_norm"]) == (expected["loss"], expected["grad_norm"])
        assert metrics["lr"] == expected["lr"]
        assert same(weights_of(resumed), after)
    finally:
        resumed.close()


def test_loading_another_model_is_corrupt(policy: MegatronPolicy, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "policy", hidden=64, family="qwen2_5_vl")
    with pytest.raises(OmnifleetError) as caught:
        policy.load(tmp_path)
    assert caught.value.reason is Reason.CORRUPT


def test_frozen_weights_stay_and_their_media_are_encoded_once(source: Path) -> None:
    policy = opened(source, freeze=("visual.*", "model.layers.0.self_attn.[qkv]_proj.*"))
    try:
        before, batch = weights_of(policy), batch_for(source)
        policy.logprobs(batch)
        metrics = policy.train(batch)
        assert metrics["media_encoded"] == 0 and not policy.encoder_trains
        for name, tensor in weights_of(policy).items():
            assert torch.equal(tensor, before[name]) == (name not in policy.trainable_names()), name
        assert "model.layers.0.self_attn.o_proj.weight" in policy.trainable_names()
        assert "model.layers.0.self_attn.q_proj.weight" not in policy.trainable_names()
    finally:
        policy.close()


def test_freeze_patterns_that_match_nothing_or_split_a_weight_are_refused(source: Path) -> None:
    for pattern, words in (("visaul.*", "matches no weight"), ("*.q_proj.weight", "name all or none")):
        with pytest.raises(OmnifleetError, match=words) as caught:
            opened(source, freeze=(pattern,))
        assert caught.value.reason is Reason.INVALID_CONFIG and caught.value.knob == "model.freeze"


def test_offload_and_onload_go_round(policy: MegatronPolicy, source: Path) -> None:
    batch = batch_for(source)
    policy.train(batch)
    before = policy.logprobs(batch)
    policy.offload()
    policy.onload()
    for ours, again in zip(before, policy.logprobs(batch), strict=True):
        np.testing.assert_array_equal(ours, again)
    assert policy.train(batch)["updates"] == 1


def test_a_gradient_that_is_not_finite_moves_nothing(policy: MegatronPolicy, source: Path) -> None:
    before, batch = weights_of(policy), batch_for(source)
    sound = batch.segments
    broken = {key: dict(segment) for key, segment in sound.items()}
    for segment in broken.values():
        for name in ("pixel_values", "pixel_values_videos"):
            if name in segment:
                segment[name] = np.full_like(segment[name], np.nan)
    metrics = policy.train(StepBatch(batch.samples, 0, broken))
    assert metrics["skipped_updates"] == 1 and metrics["updates"] == 0
    assert same(weights_of(policy), before)
    assert policy.train(batch)["updates"] == 1  # nothing of it is left in the buffers
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(policy).values())


def test_kl_pulls_back_to_where_the_run_began(source: Path) -> None:
    policy = opened(source, objective=ObjectiveConfig(kl_coefficient=0.5))
    try:
        batch = batch_for(source)
        assert policy.train(batch)["kl_penalty"] == pytest.approx(0.0, abs=1e-6)
        assert policy.train(batch)["kl_penalty"] > 1e-6
    finally:
        policy.close()


def test_what_this_backend_cannot_do_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=64)
    recipe = {"run": {"name": "r"}, "model": {"path": str(tmp_path)}, "reward": [{"name": "format"}]}
    with pytest.raises(OmnifleetError, match=r"qwen2_vl; it knows qwen2_5_vl, qwen3_vl") as caught:
        open_policy(Recipe.model_validate(recipe | {"trainer": {"backend": "megatron"}}), tmp_path)
    assert caught.value.reason is Reason.UNSUPPORTED and caught.value.knob == "model.path"


@pytest.mark.skipif(torch.cuda.is_available() or compat.has_engine(), reason="the real things are here")
def test_the_stand_ins_are_gone_when_they_are_not_needed(
    policy: MegatronPolicy, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.cuda.current_device
    with compat.on_cpu():
        assert str(torch.cuda.current_device()) == "cpu"
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.cuda.current_device is device
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert "transformer_engine" not in sys.modules
    assert "triton" not in sys.modules or importlib.util.find_spec("triton") is not None
    from megatron.core.extensions import transformer_engine

    assert not transformer_engine.HAVE_TE
    assert policy.describe()["megatron_core"].startswith(compat.VERSIONS["megatron-core"])
    monkeypatch.setitem(compat.VERSIONS, "megatron-bridge", "9.")
    with pytest.raises(OmnifleetError, match="megatron-bridge") as caught:
        compat.install()
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_demo_s_recipe_trains_on_megatron(source: Path, cli_run: Callable[..., CliRun]) -> None:
    """Real engines and every service: what the policy is given back by the engine are its own logprobs."""
    run = cli_run(
        "trainer.backend=megatron",
        f"model.path={source}",
        "trainer.steps=3",
        "trainer.prompts_per_step=8",
        "trainer.optimizer.lr=1e-4",
        "data.train.size=64",
        "rollout.workers=1",
        "rollout.max_workers=1",
        engine="vllm",
    )
    run.train()
    assert run.finish(540) == 0
    steps = read_run(run.run_dir).steps
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert steps[1]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)  # the weights that generated
    assert run.summary()["tmpe_max"] < 1.05
