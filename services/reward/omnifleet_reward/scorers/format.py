"""`format`: does the reply follow the think-then-answer template? Same rule as NeMo RL's format reward."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet_reward.places import thoughts
from omnifleet_reward.scorer import Reply, Scorer, Verdict

THINK_SHARE, ANSWER_SHARE = 0.25, 0.75


class Params(StrictModel):
    """Names of the two tags."""

    think_tag: str = Field("think", min_length=1)
    """Tag around the reasoning."""
    answer_tag: str = Field("answer", min_length=1)
    """Tag around the final answer."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 0.25 · [<think>…</think> occurs] + 0.75 · [<answer>…</answer> occurs], line breaks included; no opinion.

    Examples: `<think>x</think><answer>9</answer>` → 1; `x</think><answer>9</answer>`, where the chat template opened the
    think tag, → 0.75; `9` → 0.
    """
    think = THINK_SHARE if _has_pair(params.think_tag, reply.response) else 0.0
    answer = ANSWER_SHARE if _has_pair(params.answer_tag, reply.response) else 0.0
    return Verdict(think + answer)


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """A complete reply. Where the chat template opened the think tag, the reply holds only its end: 0.75 at most."""
    return [Reply(wrap(prompt_suffix, params, f"<{params.answer_tag}>1</{params.answer_tag}>"), "1")]


def wrap(prompt_suffix: str, params: Params, reply: str) -> str:
    """The reply with thoughts before it and tags around its answer, where they are missing."""
    if not _has_pair(params.answer_tag, reply):
        reply = f"<{params.answer_tag}>{reply}</{params.answer_tag}>"
    before, after = thoughts(params.think_tag, prompt_suffix)
    if not after or after in reply:
        return reply
    return f"{before}One.{after}\n{reply}"


def _has_pair(tag: str, text: str) -> bool:
    opened = text.find(f"<{tag}>")
    return opened >= 0 and text.find(f"</{tag}>", opened) >= 0


SCORER = Scorer("format", "1", "Think and answer tags: 0.25 + 0.75.", judge, Params, examples, wrap)
