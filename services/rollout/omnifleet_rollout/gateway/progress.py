"""One sample on its way: what is made so far, where it came from, and how another worker goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, VersionSpan
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import spans_from_wire, spans_to_wire

Decode = Callable[[list[int]], str]


@dataclass(slots=True)
class Progress:
    """token_ids and logprobs: one entry a token made. spans: of these tokens, as the workers reported them."""

    index: int
    sampling: rollout_pb2.Sampling
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    text: str = ""

    def take(self, chunk: rollout_pb2.TokenChunk) -> None:
        """Add new tokens. Raises CORRUPT if their logprobs or spans do not fit."""
        start, count = len(self.token_ids), len(chunk.token_ids)
        spans = spans_from_wire(chunk.spans)
        if len(chunk.logprobs) != count or not covers(spans, start, start + count):
            raise _corrupt(
                f"sample {self.index}: {count} tokens at {start} came with {len(chunk.logprobs)} logprobs, {spans}"
            )
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.text += chunk.text
        self.spans = joined([*self.spans, *spans])

    def finish(self, done: rollout_pb2.Finished) -> None:
        """Take the worker's last word on the spans. Raises CORRUPT if it does not fit the tokens that came."""
        spans = spans_from_wire(done.spans)
        if done.tokens != len(self.token_ids) or not covers(spans, 0, len(self.token_ids)):
            raise _corrupt(
                f"sample {self.index}: {len(self.token_ids)} tokens came; the worker says {done.tokens} in {spans}"
            )
        self.spans = spans

    def continuation(self) -> rollout_pb2.Continuation | None:
        """What another worker goes on from; None before the first token."""
        if not self.token_ids:
            return None
        return rollout_pb2.Continuation(
            token_ids=self.token_ids, logprobs=self.logprobs, spans=spans_to_wire(self.spans)
        )

    def begin_again(self) -> None:
        """Forget all that was made."""
        self.token_ids, self.logprobs, self.spans, self.text = [], [], [], ""

    def complete(self, eos: Collection[int], decode: Decode | None) -> FinishReason | None:
        """Why nothing is left to make, or None: for a worker that was lost after the last token."""
        if not self.token_ids:
            return None
        last, enough = self.token_ids[-1], len(self.token_ids) >= self.sampling.min_tokens
        ends = (last in eos and not self.sampling.ignore_eos) or last in self.sampling.stop_token_ids
        if enough and ends:
            return FinishReason.STOP
        if enough and self.sampling.stop and decode is not None:
            text = decode(self.token_ids)
            if any(stop in text for stop in self.sampling.stop):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.sampling.max_tokens else None

    def whole(self) -> rollout_pb2.GenerateEvent:
        """All tokens in one chunk; their spans are in the event of the end."""
        chunk = rollout_pb2.TokenChunk(token_ids=self.token_ids, logprobs=self.logprobs, text=self.text)
        return rollout_pb2.GenerateEvent(sample=self.index, chunk=chunk)

    def finished(self, reason: FinishReason) -> rollout_pb2.GenerateEvent:
        """The end of this sample in the gateway's own words."""
        done = rollout_pb2.Finished(
            finish_reason=str(reason), spans=spans_to_wire(self.spans), tokens=len(self.token_ids)
        )
        return rollout_pb2.GenerateEvent(sample=self.index, finished=done)


def covers(spans: list[VersionSpan], start: int, end: int) -> bool:
    """True if `spans` cover [start, end) in order, without gaps."""
    position = start
    for span in spans:
        if span.start != position or span.end < span.start:
            return False
        position = span.end
    return position == end


def joined(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version and worker as one span."""
    merged: list[VersionSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and (last.version, last.worker) == (span.version, span.worker):
            merged[-1] = VersionSpan(span.version, last.start, span.end, span.worker)
        else:
            merged.append(span)
    return merged


def _corrupt(message: str) -> OmnifleetError:
    return OmnifleetError(Reason.CORRUPT, message, retryable=True)
