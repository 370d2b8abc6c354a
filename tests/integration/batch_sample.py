"""A sample of a batch that is compared between backends: its numbers follow from its place alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnifleet.address import token_digest
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample


def ith_sample(
    i: int, prompt: list[int], reply: list[int], media: Sequence[tuple[MediaKind, str]]
) -> TrainingSample:
    """The i-th: two to a group, rewards 0 and 1 in turn. media: kind and the one letter of its digest and segment key."""
    return TrainingSample(
        trajectory_id=f"t{i}",
        group_id=f"g{i // 2}",
        prompt_token_ids=prompt,
        prompt_hash=token_digest(prompt),
        token_ids=reply,
        generation_logprobs=[-5.0] * len(reply),
        mask=[1] * len(reply),
        lag=[0] * len(reply),
        reward=float(i % 2),
        advantage=1.0 if i % 2 else -1.0,
        media=tuple(MediaRef(kind, Digest(key * 64)) for kind, key in media),
        segment_keys=tuple(Digest(key) for _, key in media),
    )


def draw_experts(batch: StepBatch, layers: int, experts: int, chosen: int) -> None:
    """Give each token experts at random, no two tokens or layers alike; the third sample neither trains nor has any."""
    random = np.random.default_rng(4)
    for sample in batch.samples:
        draws = random.random((sample.length - 1, layers, experts))
        sample.experts = draws.argsort(-1)[..., :chosen].astype(np.uint8)
    batch.samples[2].experts, batch.samples[2].valid = None, False
