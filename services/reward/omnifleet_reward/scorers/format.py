"""`format`: does the reply follow the think-then-answer template? Same rule as NeMo RL's format reward."""

from __future__ import annotations

import re

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet_reward.scorer import Reply, Scorer, Verdict

THINK_SHARE, ANSWER_SHARE = 0.25, 0.75


class Params(StrictModel):
    """Names of the two tags."""

    think_tag: str = Field("think", min_length=1)
    """Tag around the reasoning."""
    answer_tag: str = Field("answer", min_length=1)
    """Tag around the final answer."""


def judge(reply: Reply, params: Params) -> Verdict:
    """0.25 for a <think>…</think> pair plus 0.75 for an <answer>…</answer> pair, line breaks included; no opinion."""
    think = THINK_SHARE if _has_pair(params.think_tag, reply.response) else 0.0
    answer = ANSWER_SHARE if _has_pair(params.answer_tag, reply.response) else 0.0
    return Verdict(think + answer)


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """A complete reply. Where the chat template opened the think tag, the reply holds only its end: 0.75 at most."""
    opening, ending = f"<{params.think_tag}>", f"</{params.think_tag}>"
    opened = opening in prompt_suffix
    closed = opened and prompt_suffix.rfind(ending) > prompt_suffix.rfind(opening)
    thoughts = "" if closed else f"{'' if opened else opening}One.{ending}\n"
    return [Reply(f"{thoughts}<{params.answer_tag}>1</{params.answer_tag}>", "1")]


def _has_pair(tag: str, text: str) -> bool:
    return re.search(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>", text, re.DOTALL) is not None


SCORER = Scorer("format", "1", "Think and answer tags: 0.25 + 0.75.", judge, Params, examples)
