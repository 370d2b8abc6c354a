"""Samples dealt to ranks, and a step on its way to another process."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.batch.shares import shard, shares, updates_of
from omnifleet_trainer.batch.wire import decode, encode


def sample(name: str, group: str, *, prompt: int = 3, reply: int = 2, media: str = "") -> TrainingSample:
    return TrainingSample(
        trajectory_id=name,
        group_id=group,
        prompt_token_ids=list(range(prompt)),
        prompt_hash="h",
        token_ids=list(range(reply)),
        generation_logprobs=[-0.1 / (i + 1) for i in range(reply)],
        mask=[1] * reply,
        lag=[0] * reply,
        reward=0.1,
        media=tuple(MediaRef(MediaKind.IMAGE, Digest(key * 64)) for key in media),
        segment_keys=tuple(Digest(key) for key in media),
    )


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6)), max_size=40), st.integers(1, 5))
def test_every_row_has_one_rank(lengths: list[tuple[int, int]], ranks: int) -> None:
    batch = StepBatch([sample(f"{i}", f"g{g}", reply=n) for i, (n, g) in enumerate(lengths)], 0)
    dealt = shares(batch, range(len(lengths)), ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    assert len(dealt) == ranks


def test_a_group_stays_together_and_ranks_get_like_numbers_of_tokens() -> None:
    batch = StepBatch([sample(f"{i}", f"g{i // 4}", reply=10 + i % 4) for i in range(64)], 0)
    dealt = shares(batch, range(64), 4)
    owners = [{batch.samples[row].group_id for row in rows} for rows in dealt]
    assert sum(len(groups) for groups in owners) == 16
    loads = [sum(batch.samples[row].length for row in rows) for rows in dealt]
    assert max(loads) == min(loads)


def test_few_groups_are_dealt_sample_by_sample() -> None:
    batch = StepBatch([sample(f"{i}", "g") for i in range(6)], 0)
    assert [len(rows) for rows in shares(batch, range(6), 3)] == [2, 2, 2]


def test_a_shard_holds_one_copy_of_each_medium_of_its_own_rows() -> None:
    """Pictures `a` and `b`, a clip `v` and a sound `s` that rows of either shard refer to."""
    segments: dict[Digest, Any] = {
        Digest(key): {"pixel_values": np.zeros((4, 2), np.float32)} for key in "ab"
    }
    clip = {
        "pixel_values_videos": np.ones((4096, 2), np.float32),
        "video_grid_thw": np.array([[16, 16, 16]]),
    }
    segments[Digest("v")] = clip
    sound = {
        "input_features": np.ones((1, 4096, 128), np.float32),
        "input_features_mask": np.ones((1, 4096), np.bool_),
    }
    segments[Digest("s")] = sound
    media = ("avs", "vs", "av", "as", "b", "bvs", "bs", "v")
    batch = StepBatch([sample(f"{i}", f"g{i}", media=keys) for i, keys in enumerate(media)], 0, segments)
    (first, second, third) = (shard(batch, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [3, 4, 6]))
    assert set(first.segments) == {Digest("a"), Digest("v"), Digest("s")}
    assert set(second.segments) == {Digest("b"), Digest("v"), Digest("s")}
    assert set(third.segments) == {Digest("a"), Digest("b"), Digest("s")}
    assert len(first.samples) == 8 and first.segments[Digest("v")] is clip
    once = sound["input_features"].nbytes
    assert once < len(encode(third)) < len(encode(first)) < 2 * once
    for name, array in decode(encode(first)).segments[Digest("s")].items():
        assert array.dtype == sound[name].dtype and np.array_equal(array, sound[name])


def test_updates_cover_the_step() -> None:
    batch = StepBatch([sample(f"{i}", "g") for i in range(6)], 0)
    assert [list(rows) for rows in updates_of(batch, 4)] == [[0, 1, 2, 3], [4, 5]]
    assert [list(rows) for rows in updates_of(batch, None)] == [list(range(6))]
    assert updates_of(StepBatch([], 0), None) == []


def test_a_step_travels_exactly() -> None:
    """Every field, to the bit: a new one that is forgotten here fails."""
    full = sample("t", "g", media="ab")
    full.penalties, full.kept_ids, full.truncated = ((0, 1, -0.3),), [[1, 2], []], True
    full.advantage, full.reward = 1 / 3, -2 / 7
    full.experts = np.arange(8, dtype=np.int16).reshape(4, 2, 1)
    clip = {
        "pixel_values_videos": np.random.default_rng(0).random((4, 3)),
        "video_grid_thw": np.array([[1, 2, 2]]),
    }
    segments = {Digest("a"): {"pixel_values": np.ones((2, 2), np.float16)}, Digest("b"): clip}
    batch = StepBatch([full, sample("u", "g", reply=0)], 7, segments)
    back = decode(encode(batch))
    assert back.step == 7 and back.segments.keys() == segments.keys()
    for key, segment in segments.items():
        for name, value in segment.items():
            assert back.segments[key][name].dtype == value.dtype
            np.testing.assert_array_equal(back.segments[key][name], value)
    for ours, theirs in zip(back.samples, batch.samples, strict=True):
        for field in dataclasses.fields(TrainingSample):
            one, other = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(other, np.ndarray):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
            else:
                assert one == other, field.name
