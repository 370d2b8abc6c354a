"""From turns to one token-exact sequence: what the model said trains, what the environment said in between does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, LogprobsMode, MediaRef, VersionSpan


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply. prompt_token_ids: expanded, all that the model saw. media: in the order of that prompt.

    token_ids, logprobs, spans: as in `omnifleet.types.Sample`. prompt_hash: `token_digest` as the engine computed it.
    routed_experts, sampling_mask: likewise, if they were asked for and the engine had them; but see `following`.
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
    routed_experts: bytes = b""
    sampling_mask: bytes = b""


@dataclass(frozen=True, slots=True)
class Episode:
    """prompt_token_ids: of the first turn. token_ids: all replies and what lies between them; mask: 1 = the model's own.

    logprobs: 0 where mask is 0. spans: cover all tokens; the environment's count to the reply before them.
    routed_experts, sampling_mask: of all tokens, in the form of `omnifleet.types.Sample`; empty if a turn came without.
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
    routed_experts: bytes = b""
    sampling_mask: bytes = b""


def following(turn: Turn, before: Turn | None) -> Turn:
    """The turn without the experts of tokens that the turn before it told of.

    An engine tells the experts of the whole prompt with every reply; so an episode would hold those of its first tokens
    once a turn. Raises CORRUPT for what cannot be read.
    """
    if before is None or not turn.routed_experts:
        return turn
    told = len(before.prompt_token_ids) + len(before.token_ids) - 1
    rows = _tensors(turn.routed_experts, ("routed_experts",))["routed_experts"][told:]
    return replace(turn, routed_experts=save({"routed_experts": np.ascontiguousarray(rows)}))


def join_turns(turns: Sequence[Turn]) -> Episode:
    """The episode of at least one turn, each as `following` leaves it.

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
    return replace(whole, routed_experts=_joined_experts(turns), sampling_mask=_joined_masks(turns))


def _joined_experts(turns: Sequence[Turn]) -> bytes:
    """What an environment said was routed too, as the prompt of the turn after it."""
    if not all(turn.routed_experts for turn in turns):
        return b""
    parts = [_tensors(turn.routed_experts, ("routed_experts",))["routed_experts"] for turn in turns]
    if len({part.shape[1:] for part in parts}) > 1:
        raise _corrupt("turns were routed through models of different shape")
    return save({"routed_experts": np.concatenate(parts)})


def _joined_masks(turns: Sequence[Turn]) -> bytes:
    """Nothing was drawn, so nothing left out, where an environment spoke."""
    if not all(turn.sampling_mask for turn in turns):
        return b""
    parts = [_tensors(turn.sampling_mask, ("token_ids", "lengths", "start")) for turn in turns]
    lengths, known = list[npt.NDArray[Any]](), 0
    for number, (turn, part) in enumerate(zip(turns, parts, strict=True)):
        between = len(turn.prompt_token_ids) - known if number else 0
        lengths += [np.zeros(between, np.int32), part["lengths"]]
        known = len(turn.prompt_token_ids) + len(turn.token_ids)
    return save(
        {
            "token_ids": np.concatenate([part["token_ids"] for part in parts]),
            "lengths": np.concatenate(lengths),
            "start": np.max([part["start"] for part in parts], axis=0),
        }
    )


def _tensors(data: bytes, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        found = load(data)
    except (SafetensorError, ValueError) as error:
        raise _corrupt(f"what came beside a reply's tokens cannot be read: {error}") from None
    if lacking := [name for name in names if name not in found]:
        raise _corrupt(f"what came beside a reply's tokens lacks {', '.join(lacking)}")
    return found


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
