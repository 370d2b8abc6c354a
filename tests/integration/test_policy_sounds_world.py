"""Sounds in the Megatron policy, and on two ranks in both: the numbers of AutoModel on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.integration.family_world import close_to
from tests.integration.hearing_world import FROZEN, batch_for
from tests.integration.rank_world import History, equal, opened, weights_of
from tests.integration.test_policy_nemotron_world import attention_of_another_model, with_tower_heads

__all__ = ["attention_of_another_model"]
pytestmark = [pytest.mark.heavy, pytest.mark.soak]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing") / "model"
    write_hybrid(folder, hidden=128, sound=True)
    with_tower_heads(folder, 2)
    return folder


def history(policy: Policy, source: Path, folder: Path) -> History:
    """Sounds in some samples, a picture in others, neither in one: a rank may have either alone."""
    batch = batch_for(source)
    logprobs, steps = policy.logprobs(batch), [policy.train(batch) for _ in range(3)]
    policy.save(folder)
    return History(logprobs, steps, weights_of(policy), policy.train(batch))


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[History, Path]:
    folder = tmp_path_factory.mktemp("alone") / "saved"
    policy = opened(source)
    try:
        return history(policy, source, folder), folder
    finally:
        policy.close()


@pytest.mark.parametrize(
    ("backend", "parallel", "changes"),
    [
        ("megatron", None, {}),
        ("megatron", None, {"packing": False, "recompute": True}),
        ("megatron", {"dp": 2, "distributed_optimizer": True}, {}),
        ("megatron", {"tp": 2, "sp": True}, {}),
        ("automodel", {"dp": 2}, {}),
    ],
    ids=["packed", "padded", "data", "tensors", "automodel"],
)
def test_every_layout_hears_the_same(
    source: Path,
    alone: tuple[History, Path],
    backend: str,
    parallel: dict[str, Any] | None,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Logprobs to 1e-5, loss and gradient norm to 4 digits over three steps, and AutoModel's checkpoint goes on alike."""
    expected, saved = alone
    policy = opened(source, parallel, backend=backend, **changes)
    try:
        stored = load_file(source / "model.safetensors")
        sent = weights_of(policy)
        assert sent.keys() == stored.keys() and all(torch.equal(sent[n], t) for n, t in stored.items())
        equal(history(policy, source, tmp_path / "saved"), expected)
        assert checkpoint_shapes(tmp_path / "saved" / "policy") == checkpoint_shapes(source)
        policy.load(saved)
        resumed = policy.train(batch_for(source))
        assert resumed["grad_norm"] == pytest.approx(expected.then["grad_norm"], rel=1e-4)
    finally:
        policy.close()


def test_a_frozen_encoder_hears_each_sound_once_in_megatron_too(source: Path) -> None:
    policy = opened(source, backend="megatron", freeze=FROZEN)
    try:
        before, batch = weights_of(policy), batch_for(source)
        policy.logprobs(batch)
        metrics = policy.train(batch)
        assert metrics["media_cached"] > 0 < metrics["media_encoded"]
        after = weights_of(policy)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert not any(name.startswith("sound_") for name in moved) and "mlp1.1.weight" in moved
    finally:
        policy.close()


@pytest.mark.parametrize(
    ("backend", "parallel"), [("megatron", None), ("automodel", {"dp": 2})], ids=["megatron", "automodel"]
)
def test_bfloat16_is_near_float32(
    source: Path, alone: tuple[History, Path], backend: str, parallel: dict[str, Any] | None
) -> None:
    """Within 1 % of a logprob; the statistics of the encoder's norms stay float32."""
    policy = opened(source, parallel, backend=backend, dtype="bfloat16")
    try:
        batch = batch_for(source)
        close_to(policy.logprobs(batch), alone[0].logprobs, rtol=0.01)
        assert policy.train(batch)["grad_norm"] == pytest.approx(alone[0].steps[0]["grad_norm"], rel=0.05)
        kinds = {t.dtype for name, t in policy.export() if "running_" in name}
        assert kinds == {torch.float32}
    finally:
        policy.close()


def test_an_encoder_that_bridge_cannot_build_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(
        config.replace('"subsampling_conv_channels": 256', '"subsampling_conv_channels": 128')
    )
    with pytest.raises(OmnifleetError, match="subsampling_conv_channels = 256") as refused:
        opened(folder, backend="megatron")
    assert refused.value.reason is Reason.UNSUPPORTED
