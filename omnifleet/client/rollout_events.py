"""What a rollout tells of its samples, event by event, and how the events fold into a generation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, Generation, LogprobsMode, MediaRef, Sample, VersionSpan
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import media_from_wire, spans_from_wire
from omnifleet.wire.errors import from_detail


@dataclass(frozen=True, slots=True)
class PromptSeen:
    """What the model really saw: expanded prompt ids (only if asked for) and their `token_digest`.

    engine: its build. processor_fingerprints: one a media item. max_tokens: of a sample, capped to what fits; 0 = not told.
    """

    prompt_hash: str
    token_ids: list[int]
    prompt_tokens: int
    worker: str
    logprobs_mode: LogprobsMode
    media: tuple[MediaRef, ...]
    engine: str = ""
    processor_fingerprints: tuple[str, ...] = ()
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Next tokens of one sample, one logprob each; spans count from the sample's start."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    spans: list[VersionSpan]


@dataclass(frozen=True, slots=True)
class Done:
    """One sample is complete; `spans` cover all its tokens. routed_experts, sampling_mask: see `omnifleet.types.Sample`."""

    sample: int
    finish_reason: FinishReason
    spans: list[VersionSpan]
    tokens: int
    cached_prompt_tokens: int
    routed_experts: bytes = b""
    sampling_mask: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """One sample could not be finished."""

    sample: int
    error: OmnifleetError


Event = PromptSeen | Tokens | Done | Failed


def event_from_wire(message: rollout_pb2.GenerateEvent) -> Event:
    """Message -> event. Raises OmnifleetError(INTERNAL) for an event that this build does not know."""
    match message.WhichOneof("event"):
        case "prompt":
            echo = message.prompt
            return PromptSeen(
                echo.prompt_hash,
                [*echo.token_ids],
                echo.prompt_tokens,
                echo.worker,
                LogprobsMode(echo.logprobs_mode),
                tuple(media_from_wire(m) for m in echo.media),
                echo.engine,
                tuple(echo.processor_fingerprints),
                echo.max_tokens,
            )
        case "chunk":
            chunk = message.chunk
            spans = spans_from_wire(chunk.spans)
            return Tokens(message.sample, [*chunk.token_ids], [*chunk.logprobs], chunk.text, spans)
        case "finished":
            done = message.finished
            return Done(
                message.sample,
                FinishReason(done.finish_reason),
                spans_from_wire(done.spans),
                done.tokens,
                done.cached_prompt_tokens,
                done.routed_experts,
                done.sampling_mask,
            )
        case "failed":
            return Failed(message.sample, from_detail(message.failed.error))
    raise OmnifleetError(
        Reason.INTERNAL, "the service sent an event of unknown kind", knob="upgrade omnifleet"
    )


async def gathered(events: AsyncIterator[Event], request_id: str, n: int) -> Generation:
    """Fold events into a Generation; a sample without an end is WORKER_LOST, one with lost tokens is CORRUPT."""
    seen: PromptSeen | None = None
    samples = {index: Sample(index) for index in range(n)}
    failures: dict[int, Exception] = {}
    ended: set[int] = set()
    async for event in events:
        match event:
            case PromptSeen():
                seen = event
            case Tokens(sample=index):
                samples[index].token_ids += event.token_ids
                samples[index].logprobs += event.logprobs
                samples[index].text += event.text
            case Done(sample=index):
                _finish(samples[index], event, failures)
                ended.add(index)
            case Failed(sample=index):
                failures[index] = event.error
                ended.add(index)
    for index in samples.keys() - ended:
        failures[index] = OmnifleetError(
            Reason.WORKER_LOST, f"sample {index} has no end: the stream broke", retryable=True
        )
    whole = {index: sample for index, sample in samples.items() if index not in failures}
    if seen is None and any(sample.token_ids for sample in whole.values()):
        raise OmnifleetError(Reason.CORRUPT, f"request {request_id}: no prompt echo came with the samples")
    return Generation(
        request_id,
        seen.prompt_hash if seen else "",
        seen.token_ids if seen else [],
        seen.logprobs_mode if seen else LogprobsMode.PROCESSED,
        seen.worker if seen else "",
        whole,
        failures,
    )


def _finish(sample: Sample, done: Done, failures: dict[int, Exception]) -> None:
    sample.finish_reason, sample.spans = done.finish_reason, done.spans
    sample.cached_prompt_tokens = done.cached_prompt_tokens
    sample.routed_experts, sample.sampling_mask = done.routed_experts, done.sampling_mask
    if not done.tokens == len(sample.token_ids) == len(sample.logprobs):
        failures[sample.index] = OmnifleetError(
            Reason.CORRUPT,
            f"sample {sample.index}: {len(sample.token_ids)} tokens and {len(sample.logprobs)} logprobs came, "
            f"{done.tokens} were made",
            retryable=True,
        )
