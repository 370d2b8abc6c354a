"""A policy of two ranks, each a process: the same numbers as one, and an end that is seen when one is lost."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy import automodel, shards
from omnifleet_trainer.policy.folder import read_folder
from omnifleet_trainer.policy.names import checkpoint_shapes
from omnifleet_trainer.policy.port import Policy
from omnifleet_trainer.policy.world import WorldPolicy
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.families import Family
from tests.integration.family_world import batch_for
from tests.integration.rank_world import History, equal, history, opened, weights_of

pytestmark = [pytest.mark.heavy, pytest.mark.soak]
FAMILY: Family = "qwen3_vl"
"""Its tower feeds inner layers too."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "model"
    write_checkpoint(folder, family=FAMILY, hidden=64)
    return folder


def of_ranks(dp: int, source: Path, **changes: Any) -> Policy:
    return opened(source, {"dp": dp} if dp > 1 else None, **changes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def alone(source: Path, saved: Path) -> History:
    """One rank, in this process and before the world: a process is in one group at a time."""
    policy = of_ranks(1, source)
    try:
        return history(policy, source, saved / "one")
    finally:
        policy.close()


@pytest.fixture(scope="module")
def world(source: Path, alone: History) -> Iterator[WorldPolicy]:
    policy = of_ranks(2, source)
    assert isinstance(policy, WorldPolicy)
    yield policy
    policy.close()


@pytest.fixture(scope="module")
def together(world: WorldPolicy, source: Path, saved: Path) -> History:
    return history(world, source, saved / "two")


def test_two_ranks_train_as_one(alone: History, together: History) -> None:
    """Media in some micro-batches only, so that a rank without them runs the tower along."""
    equal(together, alone)


def test_two_ranks_write_one_checkpoint(together: History, source: Path, saved: Path) -> None:
    folder = saved / "two" / "policy"
    stored = dict(read_folder(folder))
    assert checkpoint_shapes(folder) == checkpoint_shapes(source)
    assert len(list(folder.glob("model-*.safetensors"))) == 2  # one of each rank
    assert (folder / "tokenizer.json").exists()
    assert all(torch.equal(stored[name], tensor) for name, tensor in together.weights.items())


def test_two_ranks_go_on_from_a_checkpoint_of_one(
    world: WorldPolicy, alone: History, together: History, source: Path, saved: Path
) -> None:
    world.load(saved / "one")
    resumed = world.train(batch_for(source))
    for name in ("loss", "grad_norm", "lr"):
        assert resumed[name] == pytest.approx(alone.then[name], rel=1e-4), name


def test_an_export_that_is_not_read_to_its_end_leaves_the_ranks_in_step(
    world: WorldPolicy, source: Path
) -> None:
    tensors = world.export()
    name, tensor = next(tensors)
    assert tuple(tensor.shape) == checkpoint_shapes(source)[name]
    tensors.close()  # type: ignore[attr-defined]
    assert len(world.logprobs(batch_for(source))) == 6


class Whole:
    """Counts the bytes of whole tensors that this process holds: a tensor is counted while anyone refers to it."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.most = self.made = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, counted from now on."""
        self.made += 1
        self.live[self.made] = tensor.nbytes
        weakref.finalize(tensor, self.live.pop, self.made)
        self.most = max(self.most, sum(self.live.values()))
        return tensor


def test_no_rank_ever_holds_the_whole_model(
    world: WorldPolicy, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is the first rank; the others make the same calls. An export holds a tensor or two, a checkpoint also copies of
    this rank's half of the weights and of each moment."""
    sizes = [tensor.nbytes for tensor in weights_of(world).values()]
    exported, saved, kept = Whole(), Whole(), Whole()
    whole, deal = shards.whole, shards.Kept.__call__
    monkeypatch.setattr(automodel, "whole", lambda tensor: exported.of(whole(tensor)))
    assert sum(1 for _ in world.export()) == exported.made == len(sizes)
    assert exported.most <= 2 * max(sizes) < sum(sizes) / 2

    def copied(self: shards.Kept, tensor: torch.Tensor) -> torch.Tensor | None:
        copy = deal(self, tensor)
        return None if copy is None else kept.of(copy)

    for module in (automodel, shards):
        monkeypatch.setattr(module, "whole", lambda tensor: saved.of(whole(tensor)))
    monkeypatch.setattr(shards.Kept, "__call__", copied)
    world.save(tmp_path)
    assert saved.made >= 3 * len(sizes) and not saved.live and not kept.live
    assert saved.most <= 4 * max(sizes)
    assert 3 * 0.3 * sum(sizes) < kept.most < 3 * 0.7 * sum(sizes)


def test_what_a_rank_refuses_is_refused_and_changes_nothing(world: WorldPolicy, source: Path) -> None:
    before = weights_of(world)
    for row in range(6):  # whichever rank gets it
        batch = batch_for(source)
        batch.samples[row].prompt_hash = token_digest([1])
        with pytest.raises(OmnifleetError, match="hash") as refused:
            world.train(batch)
        assert refused.value.reason is Reason.INVALID_REQUEST
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(world).items())


def test_a_lost_rank_ends_the_call_and_all_that_follow(world: WorldPolicy, source: Path) -> None:
    """The last of the world: it is not whole any more."""
    (process,) = world._world._processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(OmnifleetError, match="rank 1 of the policy is lost") as lost:
        world.train(batch_for(source))
    assert lost.value.reason is Reason.UNAVAILABLE and lost.value.retryable
    with pytest.raises(OmnifleetError, match="rank 1"):
        world.logprobs(batch_for(source))
    world.close()
    world.close()
    assert process.poll() is not None


def test_one_rank_goes_on_from_a_checkpoint_of_two(
    world: WorldPolicy, together: History, source: Path, saved: Path
) -> None:
    world.close()
    policy = of_ranks(1, source)
    try:
        policy.load(saved / "two")
        resumed = policy.train(batch_for(source))
        for name in ("loss", "grad_norm", "lr"):
            assert resumed[name] == pytest.approx(together.then[name], rel=1e-4), name
    finally:
        policy.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "changes", "rtol"),
    [
        ("qwen2_vl", {"freeze": ("visual.*",)}, 1e-4),
        ("qwen2_5_vl", {"logprob_chunk": 4, "objective": {"kl_coefficient": 0.1}}, 1e-4),
        ("qwen2_vl", {"dtype": "bfloat16"}, 3e-2),
        ("qwen2_vl", {"batch_samples": 2, "prompts_per_step": 1, "generations_per_prompt": 6}, 1e-4),
        ("qwen3_vl", {"tp": 2, "recompute": True, "objective": {"kl_coefficient": 0.1}}, 1e-4),
    ],
)
def test_ranks_train_as_one_in_every_setting(
    family: Family, changes: dict[str, Any], rtol: float, tmp_path: Path
) -> None:
    tp = changes.pop("tp", 1)
    write_checkpoint(tmp_path, family=family, hidden=64 * tp, tie_embeddings=family == "qwen2_5_vl")
    sizes = {"dp": changes.pop("dp", 2 if tp == 1 else 1), "tp": tp}
    histories = []
    for parallel in (None, sizes):
        policy = opened(tmp_path, parallel, **changes)
        try:
            histories.append(history(policy, tmp_path))
            policy.offload()
            policy.onload()
            assert np.isfinite(policy.train(batch_for(tmp_path))["loss"])
        finally:
            policy.close()
    equal(histories[1], histories[0], rtol=rtol)


@pytest.mark.soak
def test_tensor_parallel_ranks_go_on_from_a_checkpoint_of_one_and_back(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_checkpoint(source, family="qwen3_vl")
    saved: dict[int, History] = {}
    for tp in (1, 2):
        policy = opened(source, {"tp": tp} if tp > 1 else None)
        try:
            saved[tp] = history(policy, source, tmp_path / str(tp))
        finally:
            policy.close()
    equal(saved[2], saved[1])
    for tp in (1, 2):
        policy = opened(source, {"tp": tp} if tp > 1 else None)
        try:
            policy.load(tmp_path / str(3 - tp))
            resumed = policy.train(batch_for(source))
            for name in ("loss", "grad_norm", "lr"):
                assert resumed[name] == pytest.approx(saved[1].then[name], rel=1e-4), name
        finally:
            policy.close()


def test_layers_that_cannot_be_divided_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family="qwen3_vl", hidden=64)
    with pytest.raises(OmnifleetError, match="num_attention_heads") as refused:
        opened(tmp_path, {"tp": 2})
    assert refused.value.reason is Reason.INVALID_CONFIG and refused.value.knob == "trainer.parallel.tp"


@pytest.mark.soak
def test_nothing_is_left_of_a_world_that_could_not_be_built(source: Path) -> None:
    with pytest.raises(OmnifleetError, match="matches no weight") as refused:
        of_ranks(2, source, freeze=("visaul.*",))
    assert refused.value.reason is Reason.INVALID_CONFIG
