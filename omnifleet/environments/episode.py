"""From turns to one token-exact sequence: what the model said trains, what the environment said in between does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, LogprobsMode, MediaRef, VersionSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply. prompt_token_ids: expanded, all that the model saw. media: in the order of that prompt.

    token_ids, logprobs, spans: as in `omnifleet.types.Sample`. prompt_hash: `token_digest` as the engine computed it.
    """

    prompt_token_ids: list[int]
    prompt_hash: str
    media: tuple[MediaRef, ...]
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    logprobs_mode: LogprobsMode
    text: str


@dataclass(frozen=True, slots=True)
class Episode:
    """prompt_token_ids: of the first turn. token_ids: all replies and what lies between them; mask: 1 = the model's own.

    logprobs: 0 where mask is 0. spans: cover all tokens; the environment's count to the reply before them.
    """

    prompt_token_ids: list[int]
    prompt_hash: str
    media: tuple[MediaRef, ...]
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP
    logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED
    text: str = ""
    turns: int = 0


def join_turns(turns: Sequence[Turn]) -> Episode:
    """The episode of at least one turn.

    Raises CORRUPT if a prompt is not what its hash says or does not begin with the exact tokens (and media) of the turn
    before: such an episode was never one sequence, and training on it as if it were would be wrong.
    """
    first = turns[0]
    whole = Episode(first.prompt_token_ids, token_digest(first.prompt_token_ids), first.media)
    known = first.prompt_token_ids
    for number, turn in enumerate(turns):
        _check(turn, number, known, whole)
        between = turn.prompt_token_ids[len(known) :]
        start = len(whole.token_ids) + len(between)
        spans = _stretched(whole.spans, len(between))
        spans += [replace(span, start=span.start + start, end=span.end + start) for span in turn.spans]
        whole = replace(
            whole,
            media=turn.media,
            token_ids=[*whole.token_ids, *between, *turn.token_ids],
            mask=[*whole.mask, *([0] * len(between)), *([1] * len(turn.token_ids))],
            logprobs=[*whole.logprobs, *([0.0] * len(between)), *turn.logprobs],
            spans=spans,
            finish_reason=turn.finish_reason,
            logprobs_mode=turn.logprobs_mode,
            text=turn.text if number == 0 else f"{whole.text}\n{turn.text}",
            turns=number + 1,
        )
        known = [*turn.prompt_token_ids, *turn.token_ids]
    return whole


def _check(turn: Turn, number: int, known: Sequence[int], whole: Episode) -> None:
    ids = turn.prompt_token_ids
    if token_digest(ids) != turn.prompt_hash:
        raise _corrupt(f"turn {number}: the engine saw another prompt than it told")
    if list(ids[: len(known)]) != list(known) or (number and len(ids) == len(known)):
        raise _corrupt(f"turn {number} does not go on from the exact tokens of the turn before")
    if turn.media[: len(whole.media)] != whole.media:
        raise _corrupt(f"turn {number} has other media than the turn before")
    if number and turn.logprobs_mode is not whole.logprobs_mode:
        raise _corrupt(f"turn {number} has {turn.logprobs_mode} logprobs, those before {whole.logprobs_mode}")


def _stretched(spans: Sequence[VersionSpan], by: int) -> list[VersionSpan]:
    """The spans with the last one `by` tokens longer."""
    return [*spans[:-1], replace(spans[-1], end=spans[-1].end + by)] if spans and by else list(spans)


def _corrupt(message: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.CORRUPT, message, knob="one session an episode; rollout.engine.media_tokens = ban"
    )
