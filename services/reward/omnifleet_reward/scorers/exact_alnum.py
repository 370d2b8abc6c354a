"""`exact_alnum`: is the tagged answer the reference? Same rule as NeMo RL's exact_answer_alphanumeric."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet_reward.scorer import Reply, Scorer, Verdict


class Params(StrictModel):
    """Name of the tag."""

    answer_tag: str = Field("answer", min_length=1)
    """Tag around the final answer."""


def judge(reply: Reply, params: Params) -> Verdict:
    """1/True if the answer equals the reference, both reduced to lower-case alphanumerics; else 0/False.

    The answer is what stands between the first opening and the last closing tag (greedy).
    """
    answer = tagged(params.answer_tag, reply.response)
    correct = answer is not None and alphanumeric(answer) == alphanumeric(reply.ground_truth)
    return Verdict(float(correct), correct)


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The reference itself, in its tag."""
    return [Reply(f"<{params.answer_tag}>1</{params.answer_tag}>", "1")]


def tagged(tag: str, text: str) -> str | None:
    """Content from the first <tag> to the last </tag> after it, or None."""
    _, opened, rest = text.partition(f"<{tag}>")
    content, closed, _ = rest.rpartition(f"</{tag}>")
    return content if opened and closed else None


def alphanumeric(text: str) -> str:
    """Letters and digits of any script, lower-case."""
    return "".join(character for character in text if character.isalnum()).lower()


SCORER = Scorer(
    "exact_alnum", "1", "Tagged answer equals the reference in letters and digits.", judge, Params, examples
)
