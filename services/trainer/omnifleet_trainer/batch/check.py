"""What must hold of a sample before it may train. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample


def check_batch(batch: StepBatch, rows: Iterable[int] | None = None) -> None:
    """Check every sample (or `rows`), and that every media segment is there. Raises OmnifleetError; nothing is changed."""
    for row in range(len(batch.samples)) if rows is None else rows:
        sample = batch.samples[row]
        check_sample(sample)
        for key in sample.segment_keys:
            if key not in batch.segments:
                raise OmnifleetError(
                    Reason.MEDIA_LOST, f"sample {sample.trajectory_id}: the batch lacks media segment {key}"
                )


def check_sample(sample: TrainingSample) -> None:
    """Raises OmnifleetError(INVALID_REQUEST) that names the sample and what does not fit."""
    name, tokens = sample.trajectory_id, len(sample.token_ids)
    for field, values in (
        ("generation_logprobs", sample.generation_logprobs),
        ("mask", sample.mask),
        ("lag", sample.lag),
    ):
        if len(values) != tokens:
            raise invalid(f"sample {name}: {len(values)} entries of {field} for {tokens} response tokens")
    if sample.kept_ids is not None and len(sample.kept_ids) != tokens:
        raise invalid(
            f"sample {name}: {len(sample.kept_ids)} entries of kept_ids for {tokens} response tokens"
        )
    if sample.experts is not None and (sample.experts.ndim != 3 or len(sample.experts) != sample.length - 1):
        raise invalid(
            f"sample {name}: experts of shape {sample.experts.shape} for {sample.length} tokens; "
            "want [tokens - 1, layers, experts a token]"
        )
    if not sample.prompt_token_ids:
        raise invalid(f"sample {name}: the prompt is empty, so its first token has no logprob")
    own = token_digest(sample.prompt_token_ids)
    if own != sample.prompt_hash:
        raise invalid(
            f"sample {name}: the engine saw a prompt of hash {sample.prompt_hash[:12]}, the trainer renders {own[:12]}",
            knob="use one tokenizer, chat template and processor on both sides",
        )
    if len(sample.segment_keys) != len(sample.media):
        raise invalid(
            f"sample {name}: {len(sample.segment_keys)} segments for {len(sample.media)} media references"
        )
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in sample.generation_logprobs):
        raise invalid(f"sample {name}: generation_logprobs must be finite and at most 0")
    if not math.isfinite(sample.advantage) or not math.isfinite(sample.reward):
        raise invalid(
            f"sample {name}: advantage {sample.advantage} and reward {sample.reward} must be finite"
        )
