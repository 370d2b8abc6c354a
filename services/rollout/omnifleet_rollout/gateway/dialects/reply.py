"""Samples as they come: events folded into choices, with their text, their tokens and where both came from."""

from __future__ import annotations

import time
import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnifleet.client.rollout import Done, Event, Failed, PromptSeen, Tokens
from omnifleet.types import FinishReason, Sampling, VersionSpan
from omnifleet_rollout.gateway.dialects.fields import CommonFields
from omnifleet_rollout.gateway.parsing import Parsed, Parsers
from omnifleet_rollout.gateway.renderer import Renderer
from omnifleet_rollout.gateway.text import TextStream


@dataclass(slots=True)
class Choice:
    """One sample. said: all text so far, stop strings and what follows cut off. parsed: set at the end.

    extras: set at the end: name -> safetensors in base64, for each that was asked for.
    """

    index: int
    text: TextStream
    said: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0
    parsed: Parsed | None = None
    extras: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event added to a choice. text: certain now, and not for a parser to judge."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]

    @property
    def last(self) -> bool:
        """True if the sample has ended."""
        return self.choice.finish is not None


def shortest(logprobs: Sequence[float]) -> list[float]:
    """The same float32 values with the fewest digits: JSON would write out a double's seventeen."""
    return [float(text) for text in np.asarray(logprobs, np.float32).astype(str)]


class Reply:
    """One request's samples.

    parsers, tools: text is held back and parsed whole at a sample's end; without parsers it is passed on as it comes.
    """

    def __init__(
        self,
        kind: str,
        request: CommonFields,
        sampling: Sampling,
        renderer: Renderer,
        model: str,
        *,
        parsers: Parsers | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.request, self.sampling, self.renderer, self.model = request, sampling, renderer, model
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.seen: PromptSeen | None = None
        self._parsers, self._tools, self._template_kwargs = parsers, tools, template_kwargs
        self._ends = renderer.eos | set(sampling.stop_token_ids)
        self.choices = [Choice(i, TextStream(self._decode, sampling.stop)) for i in range(sampling.n)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Text without what ends a reply; parsers see the other special tokens, since calls may be made of them."""
        ids = [id for id in token_ids if id not in self._ends]
        if self._parsers is None:
            return self.renderer.decode(ids)
        return str(self.renderer.tokenizer.decode(ids, skip_special_tokens=False))

    def take(self, event: Event) -> Piece | None:
        """Fold one event in; None for the prompt's echo. Raises a sample's failure."""
        match event:
            case PromptSeen():
                self.seen = event
                return None
            case Tokens():
                choice = self.choices[event.sample]
                logprobs = shortest(event.logprobs)
                choice.token_ids += event.token_ids
                choice.logprobs += logprobs
                text = choice.text.push(event.token_ids)
                return self._piece(choice, text, event.token_ids, logprobs, event.spans)
            case Done():
                choice = self.choices[event.sample]
                choice.finish, choice.spans = event.finish_reason, event.spans
                choice.cached = event.cached_prompt_tokens
                choice.extras = {n: b64encode(getattr(event, n)).decode() for n in self.request.extras}
                text = choice.text.flush()
                piece = self._piece(choice, text, [], [], event.spans)
                choice.parsed = self._parse(choice.said)
                return piece
            case Failed():
                raise event.error

    def _piece(
        self, choice: Choice, text: str, ids: list[int], logprobs: list[float], spans: list[VersionSpan]
    ) -> Piece:
        choice.said += text
        return Piece(choice, "" if self._parsers else text, ids, logprobs, spans)

    def _parse(self, text: str) -> Parsed:
        if self._parsers is None:
            return Parsed(text)
        return self._parsers.parse(text, self._tools, self._template_kwargs)

    @property
    def parses(self) -> bool:
        """True if text comes parsed, at the end of each sample."""
        return self._parsers is not None

    # ------------------------------------------------------------------ what dialects say alike

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the expanded prompt."""
        return self.seen.prompt_tokens if self.seen else 0

    @property
    def made_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was there already, of the sample that reused most."""
        return max(choice.cached for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Tokens in and out. The prompt counts once."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made_tokens,
            "total_tokens": self.prompt_tokens + self.made_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def origin(self) -> dict[str, Any]:
        """The reply's own `omnifleet` block: what the model saw, and on request how it was asked."""
        seen, asked = self.seen, self.request
        if seen is None:
            return {"request_id": self.id}
        body: dict[str, Any] = {
            "request_id": self.id,
            "prompt_hash": seen.prompt_hash,
            "logprobs_mode": str(seen.logprobs_mode),
        }
        if self.with_ids:
            body["prompt_token_ids"] = seen.token_ids
        if asked.return_media or asked.return_provenance:
            body["media"] = self._media(seen)
        if asked.return_provenance:
            body |= {"engine": seen.engine, "sampling": self._sampling(seen)}
        return body

    @staticmethod
    def _media(seen: PromptSeen) -> list[dict[str, str]]:
        marks = [*seen.processor_fingerprints, *[""] * len(seen.media)]
        return [
            {"kind": str(ref.kind), "digest": ref.digest} | ({"processor_fingerprint": mark} if mark else {})
            for ref, mark in zip(seen.media, marks, strict=False)
        ]

    def _sampling(self, seen: PromptSeen) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "n", "seed", "min_tokens", "ignore_eos")
        body: dict[str, Any] = {name: getattr(self.sampling, name) for name in names}
        limit = seen.max_tokens or self.sampling.max_tokens
        lists = {"stop": list(self.sampling.stop), "stop_token_ids": list(self.sampling.stop_token_ids)}
        return {**body, "max_tokens": limit, **lists}

    @property
    def with_ids(self) -> bool:
        """True if the client wants token ids and logprobs."""
        return self.request.return_token_ids or self.request.return_provenance

    def versions(self, spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
        """Spans of tokens with the weights and the worker that made them."""
        return [
            {"version": str(s.version), "start": s.start, "end": s.end, "worker": s.worker} for s in spans
        ]

    def block(self, piece: Piece) -> dict[str, Any]:
        """A choice's `omnifleet` block in a stream: the tokens of this chunk."""
        body: dict[str, Any] = {"weight_versions": self.versions(piece.spans)}
        if self.with_ids:
            body |= {"generation_token_ids": piece.token_ids, "generation_log_probs": piece.logprobs}
        return body | piece.choice.extras

    def training(self, choice: Choice) -> dict[str, Any]:
        """What NeMo Gym's ...ForTraining types add to what the model said: three fields if ids were asked for, and extras."""
        if not self.with_ids or self.seen is None:
            return dict(choice.extras)
        return {
            **choice.extras,
            "prompt_token_ids": self.seen.token_ids,
            "generation_token_ids": choice.token_ids,
            "generation_log_probs": choice.logprobs,
        }
