r"""`geo3k`: a right boxed answer, and thoughts that end before it. Same rule as NeMo RL's reward for geometry3k and MMPR-Tiny."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet.types import Mark
from omnifleet_reward import maths
from omnifleet_reward.places import thoughts
from omnifleet_reward.scorer import Reply, Scorer, Verdict

_BOX = "\\boxed{"


class Params(StrictModel):
    """The share of the form."""

    format_score: float = Field(0.1, ge=0, le=1)
    """Weight of the form; the rest is the answer's."""


def judge(reply: Reply, params: Params) -> Verdict:
    r"""score = (1 − f) · acc + f · fmt, f = format_score; correct = acc.

    fmt = 1 if `</think>` is followed, anywhere later, by `\boxed{` and then `}`. acc = 1 if the content of the last
    `\boxed{`, braces counted, is the same mathematics as the reference; a last box that never closes is no answer.

    Examples (f = 0.1, reference 5): `x</think>\boxed{5}` → 1; `\boxed{5}` → 0.9; `x</think>\boxed{4}` → 0.1; `5` → 0.
    """
    form = float(_has_form(reply.response))
    answer = boxed(reply.response)
    equal = None if answer is None else maths.same(reply.ground_truth, answer)
    score = (1 - params.format_score) * float(bool(equal)) + params.format_score * form
    return Verdict(score, bool(equal), Mark.UNPARSEABLE if equal is None else Mark.SCORED)


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{`, every brace counted; None if there is none or it never closes."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at].strip()
    return None


def _has_form(text: str) -> bool:
    thought = text.find("</think>")
    box = text.find(_BOX, thought) if thought >= 0 else -1
    return box >= 0 and text.find("}", box) >= 0


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """A complete reply; behind a template that closed the think tag only the answer's share can be had."""
    before, after = thoughts("think", prompt_suffix)
    return [Reply(f"{before}One.{after}\n\\boxed{{1}}" if after else "\\boxed{1}", "1")]


SCORER = Scorer(
    "geo3k",
    "1",
    "Boxed answer is the reference's mathematics (1 - f), thoughts end before it (f).",
    judge,
    Params,
    examples,
    beyond=0.0,
    prepare=maths.prepare,
)
