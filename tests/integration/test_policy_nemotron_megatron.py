"""Nemotron 3 Nano Omni in the Megatron policy on one CPU rank: Bridge's model in parts, against AutoModel's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.megatron import MegatronPolicy
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.packing import Packing
from omnifleet_trainer.tiny.hybrid import DENSE, MIXED, write_hybrid
from tests.integration.family_world import close_to
from tests.integration.nemotron_world import TEMPERATURE, batch_for

pytestmark = [pytest.mark.heavy, pytest.mark.soak]
PATTERNS = {"dense": DENSE, "mixture": MIXED}


@pytest.fixture(autouse=True)
def attention_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core wants these alike of all models of a process, which has opened Qwen's."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)


@pytest.fixture(scope="module", params=PATTERNS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron") / "model"
    write_hybrid(folder, pattern=PATTERNS[request.param])
    return folder


def opened(make: Any, source: Path, *, freeze: tuple[str, ...] = (), **changes: Any) -> Any:
    backend = "megatron" if make is MegatronPolicy else "automodel"
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2)
    trainer = TrainerConfig(
        backend=backend, optimizer=optimizer, threads=1, micro_batch_tokens=300, **changes
    )
    return make(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE, freeze=freeze))


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def test_both_backends_train_alike_and_keep_the_checkpoint(source: Path, tmp_path: Path) -> None:
    """Bit for bit back; logprobs of pictures and clips to 1e-5, padded and packed; loss and gradient norm to 4 digits over 3
    steps; and a checkpoint of either is the other's."""
    batch, stored = batch_for(source), load_file(source / "model.safetensors")
    policy = opened(AutoModelPolicy, source)
    try:
        expected = policy.logprobs(batch)
        plain = [policy.train(batch) for _ in range(3)]
        trainable, after = policy.trainable_names(), weights_of(policy)
    finally:
        policy.close()
    for packing in (True, False):
        policy = opened(MegatronPolicy, source, packing=packing)
        try:
            back = weights_of(policy)
            assert back.keys() == stored.keys()
            assert all(torch.equal(back[name], stored[name]) for name in stored)
            assert policy.trainable_names() == trainable and policy.encoder_trains
            close_to(policy.logprobs(batch), expected, rtol=1e-5)
            rows = [policy.train(batch) for _ in range(3)]
            for row, other in zip(rows, plain, strict=True):
                assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-5)
                assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
            assert all(row["media_encoded"] < row["media_references"] == 10 for row in rows)
            for name, tensor in weights_of(policy).items():
                # AdamW makes a full step of a gradient that is all rounding: a few entries of rows that hardly matter.
                assert float((tensor - after[name]).abs().float().mean()) < 1e-5, name
            policy.save(tmp_path / "saved")
            then = policy.train(batch)
        finally:
            policy.close()
    policy = opened(AutoModelPolicy, source)
    try:
        policy.load(tmp_path / "saved")
        assert policy.train(batch)["grad_norm"] == pytest.approx(then["grad_norm"], rel=1e-4)
        policy.load(tmp_path / "saved")
        policy.save(tmp_path / "again")
    finally:
        policy.close()
    policy = opened(MegatronPolicy, source)
    try:
        policy.load(tmp_path / "again")
        assert policy.train(batch)["grad_norm"] == pytest.approx(then["grad_norm"], rel=1e-4)
    finally:
        policy.close()


def test_layers_are_local_whatever_the_provider_says_of_attention(source: Path) -> None:
    """The hybrid's provider asks for flash attention by default, which is Transformer Engine's."""
    policy = opened(MegatronPolicy, source)
    from megatron.core.transformer.enums import AttnBackend  # once a policy has put stand-ins for triton

    from omnifleet_trainer.compat.megatron_layers import TorchCoreAttention

    try:
        parts = dict(policy._built.core.named_modules())
        attention = {name: part for name, part in parts.items() if name.endswith("core_attention")}
        asked = {part.config.attention_backend for part in attention.values()}
    finally:
        policy.close()
    assert AttnBackend.flash in asked
    assert {"vision_model" in name for name in attention} == {True, False}, "of the tower and of the decoder"
    assert {type(part) for part in attention.values()} == {TorchCoreAttention}
    assert not [name for name, part in parts.items() if "transformer_engine" in type(part).__module__]


def test_without_the_number_of_tokens_state_leaks_in_a_pack(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `Packing.parameters` says of `total_tokens`, and why it must."""
    batch, told = batch_for(source), Packing.parameters
    policy = opened(MegatronPolicy, source)
    try:
        expected = policy.logprobs(batch)
        monkeypatch.setattr(
            Packing, "parameters", lambda self: replace(told(self), total_tokens=None, seq_idx=None)
        )
        leaked = policy.logprobs(batch)
    finally:
        policy.close()
    assert max(np.abs(a - b).max() for a, b in zip(leaked, expected, strict=True)) > 1e-3


def test_the_clip_recipes_parts_stay_frozen(source: Path) -> None:
    mixed = any(".gate." in name for name in checkpoint_shapes(source))
    routers = ("language_model.*.mixer.gate.*",) if mixed else ()
    freeze = ("vision_model.*", "mlp1.*", *routers)
    policy = opened(MegatronPolicy, source, freeze=freeze)
    try:
        before, batch = weights_of(policy), batch_for(source)
        policy.logprobs(batch)
        metrics = policy.train(batch)
        assert metrics["media_encoded"] == 0 and not policy.encoder_trains
        assert np.isfinite(metrics["grad_norm"])
        for name, tensor in weights_of(policy).items():
            assert torch.equal(tensor, before[name]) == (name not in policy.trainable_names()), name
    finally:
        policy.close()


def test_another_size_of_places_is_refused(source: Path, tmp_path: Path) -> None:
    """Bridge's tower has embeddings for 2048 pixels a side and for no other number."""
    shutil.copytree(source, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    body = json.loads(path.read_text())
    body["vision_config"]["max_img_size"] = 1024
    path.write_text(json.dumps(body))
    with pytest.raises(OmnifleetError, match="2048 pixels") as refused:
        opened(MegatronPolicy, tmp_path / "model")
    assert refused.value.reason is Reason.UNSUPPORTED
