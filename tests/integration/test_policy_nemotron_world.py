"""Nemotron 3 Nano Omni on two ranks: the same numbers as one, and checkpoints that either reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.hybrid import DENSE, MIXED, write_hybrid
from tests.integration.nemotron_world import batch_for
from tests.integration.rank_world import History, equal, opened, weights_of

pytestmark = [pytest.mark.heavy, pytest.mark.soak]


@pytest.fixture(autouse=True)
def attention_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core wants these alike of all models of a process, which has opened Qwen's."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)


def history(policy: Policy, source: Path, folder: Path) -> History:
    """Pictures in some samples, clips in others, neither in one: a rank may have either alone."""
    batch = batch_for(source)
    logprobs, steps = policy.logprobs(batch), [policy.train(batch) for _ in range(3)]
    policy.save(folder)
    return History(logprobs, steps, weights_of(policy), policy.train(batch))


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [(DENSE, "automodel"), (MIXED, "automodel"), (MIXED, "megatron")],
    ids=["dense", "mixture", "megatron's mixture"],
)
def test_two_ranks_train_as_one(pattern: str, backend: str, tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hybrid(source, pattern=pattern, hidden=64)
    policy = opened(source, backend=backend)
    try:
        alone = history(policy, source, tmp_path / "one")
    finally:
        policy.close()
    policy = opened(source, {"dp": 2}, backend=backend)
    try:
        equal(history(policy, source, tmp_path / "two"), alone)
        assert checkpoint_shapes(tmp_path / "two" / "policy") == checkpoint_shapes(source)
        policy.load(tmp_path / "one")
        resumed = policy.train(batch_for(source))
        assert resumed["grad_norm"] == pytest.approx(alone.then["grad_norm"], rel=1e-4)
    finally:
        policy.close()
