"""What the loop hands to a policy. No torch here: a light policy and the ledger's tests use it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy.typing as npt

from omnifleet.types import Digest, MediaRef


def trained_length(mask: Sequence[int]) -> int:
    """Tokens of a reply up to the last one that trains."""
    return max((i + 1 for i, trains in enumerate(mask) if trains), default=0)


Segment = Mapping[str, npt.NDArray]  # type: ignore[type-arg]
"""Model-ready tensors of one media object, by the processor's names (`pixel_values`, `image_grid_thw`)."""


@dataclass(slots=True, kw_only=True)
class TrainingSample:
    """One scored reply, token-exact.

    prompt_token_ids: expanded ids (one per image feature) as the trainer rendered them. prompt_hash:
    `omnifleet.address.token_digest` of the ids that the engine saw; a batch with another hash is refused.
    token_ids, generation_logprobs, mask, lag: one entry per response token: id, natural log of its probability when
    it was sampled, 1 = trains, and steps between the weights that made it and the weights it trains.
    advantage: filled by the loop (`objectives.assign.step_advantages`). reward: for metrics only.
    media and segment_keys: in the order of the prompt; segment_keys index `StepBatch.segments`.
    truncated: cut by the length limit. valid: False keeps the sample out of the loss.
    penalties: (start, end, advantage) of response tokens in faulty messages; the advantage replaces the sample's.
    kept_ids: per response token, the ids that the sampler's filters kept (empty = no filter), if the engine said so;
    the trainer's softmax is then over these only.
    experts: integers [prompt + reply - 1, layers, experts a token] that the engine chose, if it said so; the trainer's
    routers then choose these.
    """

    trajectory_id: str
    group_id: str
    prompt_token_ids: list[int]
    prompt_hash: str
    token_ids: list[int]
    generation_logprobs: list[float]
    mask: list[int]
    lag: list[int]
    reward: float
    advantage: float = 0.0
    media: tuple[MediaRef, ...] = ()
    segment_keys: tuple[Digest, ...] = ()
    truncated: bool = False
    valid: bool = True
    penalties: tuple[tuple[int, int, float], ...] = ()
    kept_ids: list[list[int]] | None = None
    experts: npt.NDArray | None = None  # type: ignore[type-arg]

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def trimmed(self) -> TrainingSample:
        """Without what an environment said after the last trained token: nobody would learn from it, and no row holds it.

        `truncated` stays: it speaks of the model's own words.
        """
        end = trained_length(self.mask)
        return replace(
            self,
            token_ids=self.token_ids[:end],
            generation_logprobs=self.generation_logprobs[:end],
            mask=self.mask[:end],
            lag=self.lag[:end],
            kept_ids=None if self.kept_ids is None else self.kept_ids[:end],
            experts=None if self.experts is None else self.experts[: len(self.prompt_token_ids) + end - 1],
        )


@dataclass(slots=True)
class StepBatch:
    """All samples of one training step, group after group, and every media segment that they refer to, once."""

    samples: list[TrainingSample]
    step: int
    segments: Mapping[Digest, Segment] = field(default_factory=dict)
