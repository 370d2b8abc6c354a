"""What an engine says beside tokens, from the worker's bytes to the micro-batch, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.config.load import recipe_from_mapping
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import (
    FinishReason,
    Generation,
    Identity,
    LogprobsMode,
    Sample,
    Trajectory,
    VersionSpan,
    WeightVersion,
)
from omnifleet_rollout.engine.port import EngineDelta
from omnifleet_rollout.worker.extras import Extras
from omnifleet_trainer.batch.collate import collate
from omnifleet_trainer.batch.extras import Replay, read_experts, read_kept
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.ledger.codec import pack_shared, pack_trajectory, unpack, unpack_trajectory
from omnifleet_trainer.loop.checks import check_generation
from omnifleet_trainer.loop.failures import RefusedSample
from tests.unit.loop_world import world
from tests.unit.step_world import sample

BOTH = Replay(experts=True, kept_ids=True)
VERSION = WeightVersion("run", "a", 0)
EXPERTS = np.arange(8 * 2 * 2, dtype=np.uint8).reshape(8, 2, 2) % 5
"""Of a prompt of 6 tokens and a reply of 3."""


def extras(before: int = 0, experts: Any = EXPERTS, masks: Any = ((5, 7), (6,), (8, 1))) -> Extras:
    found = Extras(before)
    found.take(EngineDelta([5, 6, 8], routed_experts=experts, sampling_mask=[list(mask) for mask in masks]))
    return found


def generation(found: Extras) -> Generation:
    reply = Sample(0, [5, 6, 8], [-1.0, -1.0, -1.0], [VersionSpan(VERSION, 0, 3)])
    reply.routed_experts, reply.sampling_mask = found.routed_experts(), found.sampling_mask()
    return Generation("r", "h", [1] * 6, LogprobsMode.PROCESSED, "w", {0: reply}, {})


def checked(found: Extras, replay: Replay = BOTH) -> list[Sample]:
    return check_generation(
        generation(found), prompt_hash="h", mode=LogprobsMode.PROCESSED, run="run", lineage="a", replay=replay
    )


def test_what_a_worker_writes_is_what_the_trainer_reads() -> None:
    (reply,) = checked(extras())
    assert np.array_equal(read_experts(reply.routed_experts, 9), EXPERTS)
    assert read_kept(reply.sampling_mask, [5, 6, 8]) == [[5, 7], [6], [8, 1]]


@pytest.mark.parametrize(
    ("found", "check", "retryable"),
    [
        (Extras(0), "routed_experts", True),  # lost, by a preemption or with a worker
        (extras(experts=EXPERTS[:-1]), "routed_experts", False),
        (extras(experts=EXPERTS[:, :, 0]), "routed_experts", False),
        (extras(masks=((5,), (6,))), "sampling_mask", False),
        (extras(masks=((5,), (9,), (8,))), "sampling_mask", False),  # 6 was not among what it was drawn from
        (extras(before=1), "sampling_mask", True),  # another worker began the reply
    ],
)
def test_what_does_not_fit_refuses_the_reply(found: Extras, check: str, retryable: bool) -> None:
    with pytest.raises(RefusedSample) as refused:
        checked(found)
    assert (refused.value.check, refused.value.retryable) == (check, retryable)
    checked(found, Replay())  # who replays nothing asks for nothing


def test_damaged_bytes_are_a_typed_refusal() -> None:
    for read in (lambda: read_experts(b"no tensors", 9), lambda: read_kept(b"no tensors", [5])):
        with pytest.raises(OmnifleetError) as refused:
            read()
        assert refused.value.reason is Reason.INVALID_REQUEST


def test_the_ledger_gives_back_the_bytes_and_older_payloads_have_none() -> None:
    found = extras()
    trajectory = trajectory_of(found)
    own, shared = unpack(pack_trajectory(trajectory)), unpack(pack_shared(trajectory))
    again = unpack_trajectory(trajectory.id, shared, own)
    assert again.routed_experts == found.routed_experts() and again.sampling_mask == found.sampling_mask()
    bare = trajectory_of(Extras(0))
    assert "routed_experts" not in unpack(pack_trajectory(bare))
    assert unpack_trajectory(bare.id, shared, unpack(pack_trajectory(bare))).routed_experts == b""


def trajectory_of(found: Extras) -> Trajectory:
    reply = generation(found).samples[0]
    return Trajectory(
        "a/0", Identity("run"), [1] * 6, "h", reply.token_ids, reply.logprobs, reply.spans, LogprobsMode.PROCESSED,
        FinishReason.STOP, "", (), 1.0, "exact@1",
        routed_experts=reply.routed_experts, sampling_mask=reply.sampling_mask,
    )  # fmt: skip


def test_experts_lie_beside_their_tokens_in_a_micro_batch() -> None:
    whole = sample("a", "g", 1.0, [5, 6, 8])
    whole.experts = np.arange((whole.length - 1) * 4).reshape(whole.length - 1, 2, 2) % 3
    short = sample("b", "g", 0.0, [5])
    short.experts = np.full((short.length - 1, 2, 2), 7)
    (micro,) = collate(StepBatch([whole, short], 1), [0, 1], micro_batch_tokens=1000, contract=None)
    assert micro.experts is not None and micro.experts.shape == (2, whole.length, 2, 2)
    first = micro.rows.index(0)
    assert np.array_equal(micro.experts[first, :-1], whole.experts)
    padding = micro.experts[1 - first, short.length - 1 :]
    assert (padding == -1).all(), "where the engine said nothing, routers choose"


def test_a_batch_in_which_a_trained_sample_lacks_experts_is_refused() -> None:
    known, lacking = sample("a", "g", 1.0, [5, 6]), sample("b", "g", 0.0, [5])
    known.experts = np.zeros((known.length - 1, 2, 2), np.int64)
    batch = StepBatch([known, lacking], 1)
    with pytest.raises(OmnifleetError, match="none in b"):
        collate(batch, [0, 1], micro_batch_tokens=1000, contract=None)
    lacking.valid = False
    (micro,) = collate(batch, [0, 1], micro_batch_tokens=1000, contract=None)
    assert micro.experts is not None


def test_trimmed_experts_end_with_the_last_trained_token() -> None:
    long = sample("a", "g", 1.0, [5, 6, 8])
    long.experts = np.zeros((long.length - 1, 1, 1), np.int64)
    long.mask = [1, 0, 0]
    assert long.trimmed().experts.shape == (len(long.prompt_token_ids), 1, 1)


async def test_a_group_without_what_the_recipe_replays_is_tried_again(tmp_path: Path) -> None:
    with world(tmp_path, steps=1, replay=BOTH) as w:
        tried = 0

        async def behave(identity: Any, answer: Generation) -> None:
            nonlocal tried
            tried += 1
            for reply in answer.samples.values():
                found = Extras(0)
                length = len(answer.prompt_token_ids) + len(reply.token_ids)
                experts = np.zeros((length - 1, 2, 1), np.uint8)
                found.take(
                    EngineDelta([], routed_experts=experts, sampling_mask=[[t] for t in reply.token_ids])
                )
                reply.sampling_mask = found.sampling_mask()
                reply.routed_experts = found.routed_experts() if tried > 1 else b""

        w.rollout.behave = behave
        assert await w.controller.run()
        assert w.counters.count("refused_routed_experts") == 1
        assert w.rollout.extras == ("routed_experts", "sampling_mask"), "asked for by name"
        (batch,) = w.policy.trained
        assert all(s.experts.shape == (s.length - 1, 2, 1) for s in batch.samples)
        assert all(s.kept_ids == [[t] for t in s.token_ids] for s in batch.samples)
        assert w.journal.values("replayed/experts") == [1.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampling": {"top_k": 4}, "rollout": {"logprobs_mode": "raw"}}, "logprobs_mode = processed"),
        ({}, "filter nothing"),
    ],
)
def test_a_recipe_whose_masks_could_not_be_replayed_is_refused(settings: dict[str, Any], says: str) -> None:
    body = {"run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}], **settings}
    body["rollout"] = {**settings.get("rollout", {}), "engine": {"return_sampling_mask": True}}
    with pytest.raises(OmnifleetError, match=says):
        recipe_from_mapping(body, "test")


def test_filters_are_allowed_once_their_choice_is_replayed() -> None:
    body = {
        "run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}], "sampling": {"top_k": 4},
        "rollout": {"engine": {"return_sampling_mask": True}},
    }  # fmt: skip
    assert Replay.of(recipe_from_mapping(body, "test")) == Replay(kept_ids=True)


@pytest.mark.parametrize("trainer", [{}, {"backend": "megatron", "dtype": "float32"}, {"recompute": True}])
def test_either_backend_replays_replies_and_episodes(trainer: dict[str, Any]) -> None:
    gym = {"environment": "gym:Gym"}
    body = {
        "run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}], "sampling": {"top_k": 4},
        "rollout": {"engine": {"return_sampling_mask": True, "return_routed_experts": True}}, "trainer": trainer,
        "data": {"train": gym, "heldout": gym},
    }  # fmt: skip
    assert Replay.of(recipe_from_mapping(body, "test")) == BOTH
