"""What must hold of a reply before it may be scored and trained on. Nothing is repaired, nothing is guessed."""

from __future__ import annotations

import math

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, Generation, LogprobsMode, Sample
from omnifleet_trainer.batch.extras import NO_REPLAY, Replay, read_experts, read_kept
from omnifleet_trainer.loop.failures import RefusedSample, Stale

_LEAST, _MOST = -1000.0, 1e-3
"""No sampler draws a token of probability e^-1000; vLLM's stand-in for "unknown" is -9999."""


def check_generation(
    generation: Generation,
    *,
    prompt_hash: str,
    mode: LogprobsMode,
    run: str,
    lineage: str,
    replay: Replay = NO_REPLAY,
) -> list[Sample]:
    """The samples by index, if all are whole and ours, and come with what is to be replayed.

    A failed member fails the group: a group is never trained short, since its baseline would be biased.
    Raises the first failure, RefusedSample, or Stale.
    """
    for failure in generation.failures.values():
        raise failure
    if generation.prompt_hash != prompt_hash:
        raise RefusedSample(
            Reason.INVALID_REQUEST,
            f"the engine saw prompt {generation.prompt_hash[:12]}, the trainer would train on {prompt_hash[:12]}",
            knob="model.path and library versions must agree on both sides",
            check="prompt_hash",
        )
    if generation.logprobs_mode is not mode:
        raise RefusedSample(
            Reason.LOGPROBS_MODE,
            f"the engine gives {generation.logprobs_mode} logprobs, the trainer computes {mode}",
            knob="rollout.logprobs_mode",
            check="logprobs_mode",
        )
    samples = [generation.samples[index] for index in sorted(generation.samples)]
    for sample in samples:
        check_sample(sample, run=run, lineage=lineage)
        check_extras(sample, len(generation.prompt_token_ids), replay)
    return samples


def check_sample(sample: Sample, *, run: str, lineage: str) -> None:
    """Raises RefusedSample for a sample that is not whole, Stale for one of another lineage."""
    if sample.finish_reason is FinishReason.ABORT:
        raise RefusedSample(
            Reason.WORKER_LOST, f"sample {sample.index} was cut off", retryable=True, check="aborted"
        )
    if not sample.token_ids or len(sample.logprobs) != len(sample.token_ids):
        raise _refused(
            "tokens",
            f"sample {sample.index} has {len(sample.token_ids)} tokens, {len(sample.logprobs)} logprobs",
        )
    for t, logprob in enumerate(sample.logprobs):
        if not math.isfinite(logprob) or not _LEAST < logprob <= _MOST:
            raise _refused(
                "logprobs",
                f"sample {sample.index}: token {t} has logprob {logprob}; a sampled token's is finite, at most 0 and "
                f"above {_LEAST:g} (engines write such values where they know none)",
            )
    covered = 0
    for span in sample.spans:
        if span.start != covered or span.end <= span.start:
            raise _refused("spans", f"sample {sample.index}: version spans leave a gap at token {covered}")
        covered = span.end
        if (span.version.run, span.version.lineage) != (run, lineage):
            raise Stale(
                Reason.VERSION_MOVED, f"sample {sample.index} has tokens of {span.version}", retryable=True
            )
    if covered != len(sample.token_ids):
        raise _refused(
            "spans",
            f"sample {sample.index}: versions are known for {covered} of {len(sample.token_ids)} tokens",
        )


def check_extras(sample: Sample, prompt_tokens: int, replay: Replay) -> None:
    """Raises RefusedSample for a sample that comes without what is to be replayed, or with what does not fit its tokens."""
    check = "routed_experts"
    try:
        if replay.experts:
            read_experts(sample.routed_experts, prompt_tokens + len(sample.token_ids))
        check = "sampling_mask"
        if replay.kept_ids:
            read_kept(sample.sampling_mask, sample.token_ids)
    except OmnifleetError as error:
        raise RefusedSample(
            error.reason,
            f"sample {sample.index}: {error.message}",
            error.retryable,
            error.knob,
            check=check,
        ) from None


def _refused(check: str, message: str) -> RefusedSample:
    return RefusedSample(Reason.INVALID_REQUEST, message, check=check)
