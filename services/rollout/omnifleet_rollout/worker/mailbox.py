"""Events of n samples on their way to one reader. Tokens of a sample merge while they wait, so a slow reader costs nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from omnifleet.errors import OmnifleetError
from omnifleet.types import VersionSpan
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import spans_to_wire
from omnifleet.wire.errors import to_detail

PACE_S = 0.02
"""Between two chunks of a call, if none of its samples ends: each message costs its reader more than a token is worth."""
WHOLE_PACE_S = 1.0
"""The same where nobody reads before a sample's end; it bounds what the gateway has to make again when a worker is lost."""


@dataclass(slots=True)
class _Pending:
    """Tokens of one sample that wait. Plain lists: a message is made once, when it goes."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    spans: list[VersionSpan] = field(default_factory=list)

    def message(self, sample: int) -> rollout_pb2.GenerateEvent:
        chunk = rollout_pb2.TokenChunk(
            token_ids=self.ids, logprobs=self.logprobs, text=self.text, spans=spans_to_wire(self.spans)
        )
        return rollout_pb2.GenerateEvent(sample=sample, chunk=chunk)


class Mailbox:
    """Bounded by what the samples may produce: n times max_tokens, in at most one pending chunk a sample."""

    def __init__(self, samples: int, pace_s: float = PACE_S) -> None:
        self._running, self._pace_s = samples, pace_s
        self._chunks: dict[int, _Pending] = {}
        self._ends: list[rollout_pb2.GenerateEvent] = []
        self._filled = asyncio.Event()
        self._ended = asyncio.Event()

    def tokens(
        self, sample: int, ids: list[int], logprobs: list[float], text: str, span: VersionSpan
    ) -> None:
        """Add new tokens of a sample."""
        pending = self._chunks.get(sample)
        if pending is None:
            pending = self._chunks[sample] = _Pending()
        pending.ids += ids
        pending.logprobs += logprobs
        pending.text += text
        spans = pending.spans
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=span.end)
        else:
            spans.append(span)
        self._filled.set()

    def finish(self, sample: int, finished: rollout_pb2.Finished) -> None:
        """The sample is complete."""
        self._end(rollout_pb2.GenerateEvent(sample=sample, finished=finished))

    def fail(self, sample: int, error: OmnifleetError) -> None:
        """The sample ended without being complete; its tokens so far stay valid."""
        failed = rollout_pb2.SampleFailed(error=to_detail(error))
        self._end(rollout_pb2.GenerateEvent(sample=sample, failed=failed))

    def _end(self, event: rollout_pb2.GenerateEvent) -> None:
        self._ends.append(event)
        self._running -= 1
        self._filled.set()
        self._ended.set()

    async def batches(self) -> AsyncGenerator[list[rollout_pb2.GenerateEvent], None]:
        """Everything, as it comes, until each sample has ended. The caller sets the deadline."""
        # A reader of tokens has the first at once.
        said = -math.inf if self._pace_s == PACE_S else time.monotonic()
        while self._chunks or self._ends or self._running:
            await self._filled.wait()
            await self._keep_pace(said)
            said = time.monotonic()
            self._filled.clear()
            self._ended.clear()
            chunks, ends = self._chunks, self._ends
            self._chunks, self._ends = {}, []
            yield [*(pending.message(sample) for sample, pending in chunks.items()), *ends]

    async def _keep_pace(self, said: float) -> None:
        """Wait until the pace is over since `said`, unless a sample ends before."""
        left = said + self._pace_s - time.monotonic()
        if left <= 0:
            return
        try:
            async with asyncio.timeout(left):
                await self._ended.wait()
        except TimeoutError:
            return
