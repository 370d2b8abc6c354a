"""Nemotron 3 Nano Omni on two ranks: the same numbers as one, and checkpoints that either reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from omnifleet.errors import OmnifleetError
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.optimizer import moment_files
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.tiny.hybrid import DENSE, MIXED, write_hybrid
from tests.integration.family_world import close_to
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


SHARED = {"tp": 2, "sp": True, "ep": 2, "distributed_optimizer": True}
"""The layout of the Megatron recipes, on two ranks."""


@pytest.mark.parametrize(
    ("pattern", "backend", "parallel", "changes"),
    [
        (DENSE, "automodel", {"dp": 2}, {}),
        (MIXED, "automodel", {"dp": 2}, {}),
        (MIXED, "megatron", {"dp": 2}, {}),
        (MIXED, "megatron", {"dp": 2, "ep": 2, "distributed_optimizer": True}, {}),
        (DENSE, "megatron", {"tp": 2}, {}),
        (MIXED, "megatron", SHARED, {"packing": False, "logprob_chunk": 4, "recompute": True}),
        (MIXED, "megatron", SHARED, {"recompute": True}),
    ],
    ids=["dense", "mixture", "megatron", "experts", "tensors", "gym-video", "mmpr-megatron"],
)
def test_two_ranks_train_as_one(
    pattern: str, backend: str, parallel: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "model"
    write_hybrid(source, pattern=pattern, hidden=64 * parallel.get("tp", 1))
    with_tower_heads(source, parallel.get("tp", 1))
    policy = opened(source, backend=backend, **changes)
    try:
        alone = history(policy, source, tmp_path / "one")
    finally:
        policy.close()
    policy = opened(source, parallel, backend=backend, **changes)
    try:
        equal(history(policy, source, tmp_path / "two"), alone)
        assert checkpoint_shapes(tmp_path / "two" / "policy") == checkpoint_shapes(source)
        assert moments(tmp_path / "two") == moments(tmp_path / "one")
        policy.load(tmp_path / "one")
        resumed = policy.train(batch_for(source))
        assert resumed["grad_norm"] == pytest.approx(alone.then["grad_norm"], rel=1e-4)
    finally:
        policy.close()


def test_two_ranks_train_in_bfloat16_as_one(tmp_path: Path) -> None:
    """To 5 %, logprobs to 1 %. A router that rounds otherwise chooses otherwise, by 0.3 nats: here every token goes to all."""
    source, changes = tmp_path / "model", {"dtype": "bfloat16", "recompute": True}
    write_hybrid(source, pattern=MIXED, hidden=128)
    with_tower_heads(source, 2)
    with_all_experts(source)
    found: list[History] = []
    for parallel in (None, SHARED):
        policy = opened(source, parallel, backend="megatron", **changes)
        try:
            found.append(history(policy, source, tmp_path / str(len(found))))
        finally:
            policy.close()
    alone, shared = found
    close_to(shared.logprobs, alone.logprobs, rtol=1e-2)
    for ours, theirs in zip(shared.steps, alone.steps, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=5e-2, abs=5e-3), name


def moments(folder: Path) -> set[str]:
    """What the optimiser's files hold, of whatever rank."""
    found: set[str] = set()
    for path in moment_files(folder / "optimizer"):
        with safe_open(path, "pt") as stored:
            found |= set(stored.keys())
    return found


def with_tower_heads(source: Path, heads: int) -> None:
    """As many, each so much narrower: a tower that tensor-parallel ranks can divide."""
    body = json.loads((source / "config.json").read_text())
    body["vision_config"]["num_attention_heads"] = heads
    (source / "config.json").write_text(json.dumps(body))


def with_all_experts(source: Path) -> None:
    """Every token goes to every expert."""
    body = json.loads((source / "config.json").read_text())
    body["text_config"]["num_experts_per_tok"] = body["text_config"]["n_routed_experts"]
    (source / "config.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [({"tp": 4, "sp": True}, "n_groups"), ({"pp": 2}, "all layers"), ({"tp": 2}, "set sp = true")],
)
def test_ranks_that_megatron_cannot_give_a_part_are_refused(
    parallel: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_hybrid(tmp_path, pattern=MIXED, hidden=256)
    with pytest.raises(OmnifleetError, match=words):
        opened(tmp_path, parallel, backend="megatron")
