"""Padding, bucketing and media places; field cases PLC-03, PLC-04, PLC-06, LPR-05."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.batch.collate import MediaContract, collate
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.objectives.reductions import reduce
from omnifleet_trainer.objectives.tensors import Normalisers

IMAGE = 99
CONTRACT = MediaContract(IMAGE, merge=2)


def sample(name: str, prompt: list[int], reply: list[int], **changes: Any) -> TrainingSample:
    fields: dict[str, Any] = {
        "trajectory_id": name,
        "group_id": "g",
        "prompt_token_ids": prompt,
        "prompt_hash": token_digest(prompt),
        "token_ids": reply,
        "generation_logprobs": [-1.0] * len(reply),
        "mask": [1] * len(reply),
        "lag": [2] * len(reply),
        "reward": 1.0,
        "advantage": 0.5,
    }
    return TrainingSample(**fields | changes)


def segment(*grid: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "pixel_values": np.zeros((int(np.prod(grid)), 6), np.float32),
        "image_grid_thw": np.array([grid]),
    }


SEGMENTS = {Digest("a"): segment(1, 4, 4), Digest("b"): segment(1, 4, 8)}


def pictures(name: str, keys: str, **changes: Any) -> TrainingSample:
    tokens = {"a": 4, "b": 8}
    prompt = [1, *(token for key in keys for token in [7, *[IMAGE] * tokens[key], 8]), 2]
    return sample(
        name,
        prompt,
        [3, 4],
        media=tuple(MediaRef(MediaKind.IMAGE, Digest(key * 64)) for key in keys),
        segment_keys=tuple(Digest(key) for key in keys),
        **changes,
    )


def test_plc_04_pictures_follow_their_samples() -> None:
    batch = StepBatch([pictures("s0", "a"), pictures("s1", "ba"), sample("s2", [1, 2], [3])], 0, SEGMENTS)
    first, second = collate(batch, [0, 1, 2], micro_batch_tokens=40, contract=CONTRACT)
    assert first.rows == (1, 0) and first.media == (
        "b",
        "a",
        "a",
    )  # longest first, pictures with their samples
    assert first.token_types.sum(-1).tolist() == [12, 4]
    assert first.grids.tolist() == [[1, 4, 8], [1, 4, 4], [1, 4, 4]]
    assert second.rows == (2,) and second.media == () and second.grids.shape == (0, 3)


def test_plc_06_padding_to_a_multiple_lengthens_every_array_and_changes_no_loss() -> None:
    batch = StepBatch([sample("s", [1, 2, 5], [3, 4])], 0)
    (plain,) = collate(batch, [0], micro_batch_tokens=64, contract=None)
    (padded,) = collate(batch, [0], micro_batch_tokens=64, contract=None, multiple=8)
    names = [f.name for f in dataclasses.fields(padded) if getattr(padded, f.name) is not None]
    per_token = [
        n for n in names if isinstance(v := getattr(padded, n), torch.Tensor) and v.ndim == 2 and n != "grids"
    ]
    assert {"input_ids", "token_types", "advantages", "token_mask", "generation_logprobs", "lag"} <= set(
        per_token
    )
    for name in per_token:
        long, short = getattr(padded, name), getattr(plain, name)
        assert long.shape == (1, 8) and short.shape == (1, 5)
        assert torch.equal(long[:, :5], short) and not long[:, 5:].any()
    whole = Normalisers(2.0, 1.0)
    losses = [
        reduce(m.generation_logprobs * m.advantages, m.token_mask, whole, "token") for m in (plain, padded)
    ]
    assert losses[0] == losses[1]


def test_plc_03_image_tokens_that_the_model_wrote_are_text_and_do_not_train() -> None:
    batch = StepBatch([dataclasses.replace(pictures("s", "a"), token_ids=[3, IMAGE])], 0, SEGMENTS)
    (micro,) = collate(batch, [0], micro_batch_tokens=64, contract=CONTRACT)
    assert micro.token_types.sum() == 4
    assert micro.token_mask[0, -2:].tolist() == [1, 0]


def test_prompt_and_features_must_agree() -> None:
    short = pictures("s", "a")
    prompt = [t for i, t in enumerate(short.prompt_token_ids) if i != 2]  # one image token gone
    batch = StepBatch([dataclasses.replace(short, prompt_token_ids=prompt)], 0, SEGMENTS)
    with pytest.raises(OmnifleetError, match="3 image tokens in the prompt for 4 features"):
        collate(batch, [0], micro_batch_tokens=64, contract=CONTRACT)


def test_an_image_token_in_the_text_of_a_sample_without_media_is_refused_and_named() -> None:
    batch = StepBatch([sample("fine", [1, 2], [3]), sample("literal", [1, IMAGE, 2], [3])], 0)
    with pytest.raises(OmnifleetError, match="sample literal: 1 image tokens in the prompt for 0 features"):
        collate(batch, [0, 1], micro_batch_tokens=64, contract=CONTRACT)


def test_a_sample_longer_than_a_micro_batch_names_the_knob() -> None:
    with pytest.raises(OmnifleetError) as caught:
        collate(StepBatch([sample("s", [1] * 9, [2])], 0), [0], micro_batch_tokens=8, contract=None)
    assert caught.value.knob == "trainer.micro_batch_tokens"


def test_advantages_are_clamped() -> None:
    batch = StepBatch([sample("s", [1], [2], advantage=-9.0)], 0)
    (micro,) = collate(batch, [0], micro_batch_tokens=8, contract=None, advantage_clip=2.0)
    assert micro.advantages.tolist() == [[0.0, -2.0]]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=20), st.integers(32, 90)
)
def test_every_sample_is_in_one_micro_batch_within_the_budget(
    shapes: list[tuple[int, int]], budget: int
) -> None:
    batch = StepBatch([sample(str(i), [1] * p, [2] * r) for i, (p, r) in enumerate(shapes)], 0)
    micros = collate(batch, range(len(shapes)), micro_batch_tokens=budget, contract=None)
    assert sorted(row for micro in micros for row in micro.rows) == list(range(len(shapes)))
    for micro in micros:
        assert micro.input_ids.numel() <= budget
        assert micro.token_mask.sum() == sum(shapes[row][1] for row in micro.rows)
        assert micro.token_mask[:, : micro.first].sum() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_hash": token_digest([1, 3])}, "hash"),
        ({"generation_logprobs": [-1.0]}, "1 entries of generation_logprobs for 2"),
        ({"lag": []}, "0 entries of lag"),
        ({"generation_logprobs": [-1.0, float("-inf")]}, "finite"),  # LPR-05
        ({"segment_keys": (Digest("a"),)}, "1 segments for 0 media"),
        ({"prompt_token_ids": []}, "empty"),
        ({"advantage": float("nan")}, "finite"),
    ],
)
def test_samples_that_do_not_hold_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OmnifleetError, match=message) as caught:
        check_batch(StepBatch([sample("s", [1, 2], [3, 4], **changes)], 0))
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_a_lost_segment_is_media_lost() -> None:
    with pytest.raises(OmnifleetError) as caught:
        check_batch(StepBatch([pictures("s", "a")], 0, {}))
    assert caught.value.reason is Reason.MEDIA_LOST


def test_pictures_that_an_environment_showed_between_replies_have_places_and_do_not_train() -> None:
    shown = [5, *[IMAGE] * 8, 6]
    played = dataclasses.replace(
        pictures("s", "a"),
        token_ids=[3, IMAGE, *shown, 4],  # the model wrote a placeholder itself: that one is text
        generation_logprobs=[-1.0, -1.0, *[0.0] * len(shown), -1.0],
        mask=[1, 1, *[0] * len(shown), 1],
        lag=[2] * (len(shown) + 3),
        media=tuple(MediaRef(MediaKind.IMAGE, Digest(key * 64)) for key in "ab"),
        segment_keys=(Digest("a"), Digest("b")),
    )
    batch = StepBatch([played], 0, SEGMENTS)
    check_batch(batch)
    (micro,) = collate(batch, [0], micro_batch_tokens=64, contract=CONTRACT)
    start = len(played.prompt_token_ids)
    assert micro.token_types[0, start:].tolist() == [0, 0, 0, *[1] * 8, 0, 0]
    assert micro.token_mask[0, start:].tolist() == [1, 0, *[0] * len(shown), 1]
    assert int(micro.token_types.sum()) == 4 + 8 and micro.media == ("a", "b")
