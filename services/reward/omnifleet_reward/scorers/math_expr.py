"""`math_expr`: is the answer the same mathematics as the reference? NeMo RL's reward of that name, with its traps mended."""

from __future__ import annotations

from omnifleet_reward import maths
from omnifleet_reward.places import AnswerPlace
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong


def judge(reply: Reply, params: AnswerPlace) -> Verdict:
    r"""score = 1 if `omnifleet_reward.maths.same(reference, answer)`, else 0.

    As in NeMo RL the answer is what the tag holds, and math-verify compares boxed(reference) with boxed(answer). Beyond it:
    `places` may name the last box or the last `Answer:`; thousands, tuples, sets and percent are told apart before math-verify
    sees them; markdown and $…$ around the answer are removed; what cannot be read, or judged in time, is marked.

    Examples (reference, answer): `1/2`, `0.5` → 1; `\sqrt{8}`, `2\sqrt{2}` → 1; `45678`, `45,678` → 1; `45678`, `456,78` → 0;
    `(3,8)`, `(8,3)` → 0; `35%`, `0.35` → 1; `4`, a tower of powers → 0, timeout.
    """
    answer = params.find(reply.response)
    if answer is None:
        return UNPARSEABLE
    equal = maths.same(reply.ground_truth, answer)
    return UNPARSEABLE if equal is None else right_or_wrong(equal)


def examples(prompt_suffix: str, params: AnswerPlace) -> list[Reply]:
    """The reference itself, where it is looked for."""
    return [Reply(params.put("1"), "1")]


SCORER = Scorer(
    "math_expr",
    "1",
    "Answer is the same mathematics as the reference (math-verify).",
    judge,
    AnswerPlace,
    examples,
    beyond=0.0,
    prepare=maths.prepare,
)
