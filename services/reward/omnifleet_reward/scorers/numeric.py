"""`numeric`: is the answer's number near enough to the reference?"""

from __future__ import annotations

import re
from fractions import Fraction

from pydantic import Field

from omnifleet.errors import invalid
from omnifleet_reward import maths
from omnifleet_reward.places import AnswerPlace, unwrapped
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong

_NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,40})?(?:\.\d{1,40})?(?:[eE][+-]?\d{1,2})?(?:\s?\\?%)?"
)


class Params(AnswerPlace):
    """Where the answer stands and how far it may be off."""

    relative: float = Field(0.0, ge=0)
    """Tolerance as a share of the reference."""
    absolute: float = Field(1e-6, ge=0)
    """Tolerance in the reference's unit."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 1 if |answer − reference| ≤ max(absolute, relative · |reference|), else 0.

    The answer is a number or fraction alone, else the last number of what stands in its place. x% is x/100, and x is accepted too.
    Examples (reference 100, relative 0.05): `about 104.9 cm` → 1; `105.1` → 0; `1,0` → 0; `many` → 0, unparseable.
    """
    known = maths.number(unwrapped(reply.ground_truth))
    if known is None:
        raise invalid(f"the reference {reply.ground_truth[:80]!r} is not a number")
    found = params.find(reply.response)
    given = None if found is None else _number(found)
    if given is None:
        return UNPARSEABLE
    return right_or_wrong(any(_near(a, b, params) for a in known.meanings() for b in given.meanings()))


def _near(known: Fraction, given: Fraction, params: Params) -> bool:
    return abs(given - known) <= max(Fraction(params.absolute), Fraction(params.relative) * abs(known))


def _number(text: str) -> maths.Number | None:
    whole = maths.number(unwrapped(text).replace("\\%", "%"))
    if whole is not None:
        return whole
    numbers = [match.group() for match in _NUMBER.finditer(text) if any(map(str.isdecimal, match.group()))]
    return maths.number(numbers[-1].replace("\\%", "%")) if numbers else None


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The reference itself."""
    return [Reply(params.put("1"), "1")]


SCORER = Scorer(
    "numeric", "1", "Answer's number is within a tolerance of the reference.", judge, Params, examples
)
