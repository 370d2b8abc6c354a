"""Field rows as the trainer's step meets them: samples through collation, forward, loss and gradient. Names carry case ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omnifleet.config.objective import ObjectiveConfig
from omnifleet.errors import OmnifleetError
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.collate import MediaContract, MicroBatch, collate
from omnifleet_trainer.batch.samples import Segment, StepBatch, TrainingSample
from omnifleet_trainer.policy.families.port import Layout
from omnifleet_trainer.policy.vision import Vision
from tests.unit import step_world
from tests.unit.loop_world import rows, world
from tests.unit.step_world import Bigrams, sample

IMAGE = 9
CONTRACT = MediaContract(IMAGE, merge=2)


# ------------------------------------------------------------------ TOK-06


class Drifted(Bigrams):
    """Its reference differs from it by `gaps` on the four tokens of a reply."""

    gaps = torch.tensor([0.1, 0.2, -5.0, -5.0], dtype=torch.float64)

    def reference_logprobs(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [self.forward(micro) - self.gaps for micro in micros]


def test_tok_06_what_an_environment_said_is_neither_trained_nor_in_the_kl() -> None:
    def step(environment: list[int], logprob: float) -> tuple[dict[str, float], Tensor]:
        policy = Drifted()
        played = sample("a", "g", 1.0, [4, 5, *environment], mask=[1, 1, 0, 0], advantage=0.5)
        played.generation_logprobs = [-1.0, -1.0, logprob, logprob]
        metrics = policy.train(StepBatch([played], 1), ObjectiveConfig(kl_type="k1", kl_coefficient=1.0))
        return metrics, policy.gradients[0]

    metrics, gradient = step([6, 7], 0.0)
    assert metrics["kl_penalty"] == pytest.approx(0.15)  # with the environment's it would be -2.425
    assert metrics["global_valid_toks"] == 2
    others, same = step([8, 3], -9.0)  # other words, and a logprob that nobody sampled
    assert torch.equal(gradient, same)
    assert others == metrics


# ------------------------------------------------------------------ PLC-04


class Plain:
    """A family whose tower gives each feature the mean of its own four patches, and shows what stands where."""

    contract = CONTRACT
    patch_values = 1

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 1)

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        assert len(pixels) == int(grids.prod(-1).sum())
        return pixels.reshape(-1, CONTRACT.merge**2, 1).mean(1)

    def text(self, micro: MicroBatch, embeds: Tensor | None = None) -> dict[str, Any]:
        return {"seen": torch.zeros(*micro.input_ids.shape)}

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        seen = torch.zeros(*micro.input_ids.shape)
        seen[micro.token_types > 0] = features[:, 0]
        assert torch.equal(layout.pictures, micro.grids)
        return {"seen": seen}


def picture(value: int, *grid: int) -> Segment:
    return {
        "pixel_values": np.full((int(np.prod(grid)), 1), value, np.float32),
        "image_grid_thw": np.array([grid]),
    }


def shown(name: str, values: list[int], segments: dict[Digest, Segment]) -> TrainingSample:
    """A sample with pictures of these values, text around each."""
    keys = [Digest(str(value)) for value in values]
    features = [int(np.prod(segments[key]["image_grid_thw"])) // 4 for key in keys]
    prompt = [1, *(token for count in features for token in [2, *[IMAGE] * count, 3])]
    media = tuple(MediaRef(MediaKind.IMAGE, Digest(key * 64)) for key in keys)
    return sample(name, "g", 1.0, [4, 5], prompt, media=media, segment_keys=tuple(keys))


def seen_by(samples: list[TrainingSample], segments: dict[Digest, Segment], limit: int) -> list[list[int]]:
    """Values of the pictures on which each sample's placeholders stand."""
    batch = StepBatch(samples, 1, segments)
    vision = Vision(Plain(), frozen=False, cache_bytes=0)
    found: list[list[int]] = [[]] * len(samples)
    for micro in collate(batch, range(len(samples)), micro_batch_tokens=limit, contract=CONTRACT):
        seen = vision.arguments(micro, segments)["seen"]
        for i, row in enumerate(micro.rows):
            found[row] = [int(v) for v, kind in zip(seen[i], micro.token_types[i], strict=True) if kind]
    return found


def test_plc_04_every_sample_sees_its_own_pixels_in_any_micro_batch() -> None:
    segments = {
        Digest("1"): picture(1, 1, 4, 4),
        Digest("2"): picture(2, 1, 4, 8),
        Digest("3"): picture(3, 1, 4, 4),
    }
    samples = [shown(name, values, segments) for name, values in (("s0", [1]), ("s1", [2, 3]), ("s2", []))]
    for limit in (19, 40, 80):  # one, two and three samples a pass
        assert seen_by(samples, segments, limit) == [[1] * 4, [2] * 8 + [3] * 4, []]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=7), st.integers(64, 300))
def test_plc_04_whoever_shares_a_pass(values: list[list[int]], limit: int) -> None:
    segments = {Digest(str(v)): picture(v, 1, 2 * (1 + v % 2), 2 * v) for v in range(1, 6)}
    samples = [shown(f"s{i}", own, segments) for i, own in enumerate(values)]
    expected = [[v for v in own for _ in range((1 + v % 2) * v)] for own in values]
    assert seen_by(samples, segments, limit) == expected


def test_plc_04_pixels_that_are_not_of_their_grid_are_refused_before_any_pass() -> None:
    torn = picture(1, 1, 4, 4) | {"pixel_values": np.zeros((15, 1), np.float32)}
    whole = {Digest("1"): picture(1, 1, 4, 4)}
    with pytest.raises(OmnifleetError, match="15 rows of pixels for a grid of 16"):
        seen_by([shown("s", [1], whole)], {Digest("1"): torn}, 64)


# ------------------------------------------------------------------ PLC-06


def test_plc_06_padding_lengthens_every_array_of_a_step_and_changes_neither_loss_nor_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = sample(
        "a",
        "g",
        1.0,
        [4, 5],
        [1, 2, 3],
        advantage=0.5,
        lag=[2, 1],
        penalties=((1, 2, -2.0),),
        kept_ids=[[4, 7], [5, 6, 8]],
        experts=np.arange(8).reshape(4, 1, 2) % 3,
    )

    def padded_to(multiple: int) -> tuple[MicroBatch, dict[str, float], Tensor]:
        monkeypatch.setattr(step_world, "collate", partial(collate, multiple=multiple))
        policy, batch = Bigrams(), StepBatch([one], 1)
        metrics = policy.train(batch, ObjectiveConfig())
        return step_world.cut(batch)[0], metrics, policy.gradients[0]

    plain, *before = padded_to(1)
    padded, *after = padded_to(8)
    arrays = {
        f.name
        for f in dataclasses.fields(padded)
        if isinstance(v := getattr(padded, f.name), Tensor) and v.ndim > 1 and f.name != "grids"
    }
    assert {
        "input_ids",
        "token_mask",
        "advantages",
        "generation_logprobs",
        "lag",
        "kept",
        "experts",
    } <= arrays
    for name in arrays:
        long, short = getattr(padded, name), getattr(plain, name)
        assert long.shape[:2] == (1, 8) and short.shape[:2] == (1, 5)
        assert torch.equal(long[:, :5], short)
    assert not padded.token_mask[:, 5:].any() and not padded.attention_mask[:, 5:].any()
    assert before[0] == after[0]
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=0)


# ------------------------------------------------------------------ CKP-03


async def test_ckp_03_a_second_resume_goes_on_where_the_first_left_off(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": rows(100), "prompts_per_step": 3, "max_epochs": 1, "max_staleness": 0}
    settings["sampler"] = "in_order"
    whole, lives = tmp_path / "whole", tmp_path / "lives"
    for folder in (whole, lives):
        folder.mkdir()
    with world(whole, steps=12, **settings) as w:
        await w.controller.run()
        order = [name for step in w.trained_prompts() for name in step]
    seen: list[str] = []
    for begun, steps in ((0, 8), (8, 11), (11, 12)):  # 24 prompts, 9, 3
        with world(lives, steps=steps, resume_at=begun, **settings) as w:
            await w.controller.run()
            seen += [name for step in w.trained_prompts() for name in step]
    assert seen[33] == order[33]
    assert seen == order
