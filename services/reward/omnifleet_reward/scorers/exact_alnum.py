"""`exact_alnum`: is the tagged answer the reference? Same rule as NeMo RL's exact_answer_alphanumeric."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet_reward.places import tagged
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong


class Params(StrictModel):
    """Name of the tag."""

    answer_tag: str = Field("answer", min_length=1)
    """Tag around the final answer."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 1 if a(answer) = a(reference), else 0; a keeps letters and digits of any script and lowers them.

    The answer is what stands between the first opening and the last closing tag (greedy).
    Examples: `<answer> Yes. </answer>` and `yes` → 1; `<answer>1,234</answer>` and `1234` → 1; no tag → 0, unparseable.
    """
    answer = tagged(params.answer_tag, reply.response)
    if answer is None:
        return UNPARSEABLE
    return right_or_wrong(alphanumeric(answer) == alphanumeric(reply.ground_truth))


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The reference itself, in its tag."""
    return [Reply(f"<{params.answer_tag}>1</{params.answer_tag}>", "1")]


def alphanumeric(text: str) -> str:
    """Letters and digits of any script, lower-case."""
    return "".join(character for character in text if character.isalnum()).lower()


SCORER = Scorer(
    "exact_alnum", "1", "Tagged answer equals the reference in letters and digits.", judge, Params, examples
)
