"""A step of text alone, as if the engine had the policy's weights: for runs that look at what an objective does."""

from __future__ import annotations

import numpy as np

from omnifleet.address import token_digest
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.loop.batches import AdvantageRule
from omnifleet_trainer.policy.port import Policy


def batch_of(groups: int, size: int, *, last_is_cut: bool = False) -> StepBatch:
    """Replies of 3 to 7 tokens; in each group the first half is right, and with `last_is_cut` the last was truncated."""
    random = np.random.default_rng(0)
    samples = []
    for g in range(groups):
        prompt = random.integers(0, 300, 6).tolist()
        for i in range(size):
            reply = random.integers(0, 300, 3 + (g + i) % 5).tolist()
            samples.append(
                TrainingSample(
                    trajectory_id=f"{g}/{i}",
                    group_id=f"g{g}",
                    prompt_token_ids=prompt,
                    prompt_hash=token_digest(prompt),
                    token_ids=reply,
                    generation_logprobs=[-1.0] * len(reply),
                    mask=[1] * len(reply),
                    lag=[0] * len(reply),
                    reward=float(i < size // 2),
                    truncated=last_is_cut and i == size - 1,
                )
            )
    return StepBatch(samples, 1)


def as_sampled(batch: StepBatch, policy: Policy, rule: AdvantageRule) -> StepBatch:
    """The batch with the policy's own logprobs as the engine's, and with its advantages."""
    for sample, values in zip(batch.samples, policy.logprobs(batch), strict=True):
        sample.generation_logprobs = values.tolist()
    for sample, advantage in zip(batch.samples, rule(batch.samples), strict=True):
        sample.advantage = advantage
    return batch
