"""`exact_text`: is the answer the reference, letter by letter, whatever its Unicode form and spacing?"""

from __future__ import annotations

import unicodedata
from typing import Literal

from pydantic import Field

from omnifleet_reward.places import AnswerPlace, Place
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong


class Params(AnswerPlace):
    """Where the answer stands and what counts as equal."""

    places: tuple[Place, ...] = Field(("tag", "text"), min_length=1)
    form: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normal form; NFKC also joins full-width letters and ligatures with plain ones."""
    ignore_case: bool = False
    """Compare case-folded text."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 1 if n(answer) = n(reference), else 0; n normalises Unicode, joins white space, trims.

    Examples: `cafe` + combining acute and `café` → 1; ` Paris\\n` and `Paris` → 1; `paris` and `Paris` → 0.
    """
    answer = params.find(reply.response)
    if answer is None:
        return UNPARSEABLE
    return right_or_wrong(_normal(answer, params) == _normal(reply.ground_truth, params))


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The reference itself."""
    return [Reply(params.put("1"), "1")]


def _normal(text: str, params: Params) -> str:
    text = " ".join(unicodedata.normalize(params.form, text).split())
    return text.casefold() if params.ignore_case else text


SCORER = Scorer(
    "exact_text",
    "1",
    "Answer equals the reference but for Unicode form and spacing.",
    judge,
    Params,
    examples,
)
