"""Which weights made which token of one sample."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from omnifleet.types import VersionSpan, WeightVersion
from omnifleet_rollout.engine.port import LabelSpan

log = logging.getLogger("omnifleet.rollout.provenance")


class Provenance:
    """Spans of one sample, without gaps. We label at receipt; where the engine tracks versions itself, its word is final."""

    def __init__(self, worker: str, before: Sequence[VersionSpan] = (), tokens_before: int = 0) -> None:
        """`before`: spans of the tokens that another worker made; they cover [0, tokens_before)."""
        self._worker = worker
        self._spans = list(before)
        self.tokens = tokens_before
        self._segment = len(self._spans), tokens_before

    def start_segment(self) -> None:
        """A new engine request begins: its label spans count from here."""
        self._segment = len(self._spans), self.tokens

    def add(self, count: int, version: WeightVersion) -> VersionSpan:
        """`count` new tokens sampled by `version`; returns their span."""
        span = VersionSpan(version, self.tokens, self.tokens + count, self._worker)
        _append(self._spans, span, within=self._segment[0])
        self.tokens += count
        return span

    def settle(self, labels: Iterable[LabelSpan], versions: Mapping[str, WeightVersion]) -> bool:
        """Replace the segment's spans by the engine's own; False if ours differed or a label is unknown to us."""
        first, offset = self._segment
        theirs: list[VersionSpan] = []
        for label in labels:
            version = versions.get(label.label)
            if version is None:
                log.warning("the engine named weights %r that were never committed here", label.label)
                return False
            _append(theirs, VersionSpan(version, offset + label.start, offset + label.end, self._worker))
        ours = self._spans[first:]
        if not theirs or theirs[0].start != offset or theirs[-1].end != self.tokens:
            return ours == theirs
        self._spans[first:] = theirs
        return ours == theirs

    @property
    def spans(self) -> list[VersionSpan]:
        """Spans over [0, tokens)."""
        return list(self._spans)


def _append(spans: list[VersionSpan], span: VersionSpan, within: int = 0) -> None:
    """Append, growing the last span if it is of the same version and worker (and not before index `within`)."""
    if span.start == span.end:
        return
    if len(spans) > within and spans[-1].version == span.version and spans[-1].worker == span.worker:
        spans[-1] = VersionSpan(span.version, spans[-1].start, span.end, span.worker)
    else:
        spans.append(span)
