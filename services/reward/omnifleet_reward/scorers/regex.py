"""`regex`: does the reply match a pattern, or does what the pattern finds equal the reference?"""

from __future__ import annotations

import re
from collections import deque

from pydantic import Field, field_validator, model_validator

from omnifleet_reward.places import AnswerPlace, Place
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong


class Params(AnswerPlace):
    """The pattern and how it is used."""

    places: tuple[Place, ...] = Field(("text",), min_length=1)
    pattern: str = Field(min_length=1)
    """Python regular expression; `.` does not match line breaks unless it says (?s)."""
    group: int | str | None = None
    """Group of the last match that must equal the reference; default: a match is enough."""
    whole: bool = False
    """Match all of the text, not a part."""
    ignore_case: bool = False
    """Let small and capital letters match, and be equal."""
    example: str | None = None
    """A reply with full marks, for the reachable maximum."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _has_group(self) -> Params:
        compiled = re.compile(self.pattern)
        names: set[int | str] = {*range(compiled.groups + 1), *compiled.groupindex}
        if self.group is not None and self.group not in names:
            raise ValueError(f"group {self.group!r} is not in the pattern")
        return self


def judge(reply: Reply, params: Params) -> Verdict:
    r"""score = 1 if the pattern matches (and, with `group`, the last match's group equals the reference, trimmed), else 0.

    With `group`, no match is 0 and unparseable. A pattern that runs out of time is 0, marked timeout.
    Examples: pattern `^\d+$`, `12` → 1; pattern `Answer: (\w+)`, group 1, reference cat, `Answer: dog\nAnswer: cat` → 1.
    """
    pattern = re.compile(params.pattern, re.IGNORECASE if params.ignore_case else 0)
    text = params.find(reply.response)
    if text is None:
        return UNPARSEABLE
    match = _match(pattern, text, params)
    if params.group is None:
        return right_or_wrong(match is not None)
    if match is None:
        return UNPARSEABLE
    found, known = (match.group(params.group) or "").strip(), reply.ground_truth.strip()
    if params.ignore_case:
        found, known = found.casefold(), known.casefold()
    return right_or_wrong(found == known)


def _match(pattern: re.Pattern[str], text: str, params: Params) -> re.Match[str] | None:
    if params.whole:
        return pattern.fullmatch(text)
    if params.group is None:
        return pattern.search(text)
    return deque(pattern.finditer(text), maxlen=1).pop() if pattern.search(text) else None


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """What the parameters give as an example, with what it captures as the reference."""
    if params.example is None:
        return []
    truth = ""
    for match in re.finditer(params.pattern, params.example):
        truth = match.group(params.group or 0) or ""
    return [Reply(params.put(params.example), truth)]


SCORER = Scorer("regex", "1", "Reply matches a pattern.", judge, Params, examples, beyond=0.0)
