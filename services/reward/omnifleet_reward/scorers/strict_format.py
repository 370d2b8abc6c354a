"""`strict_format`: exactly one block of thoughts, then exactly one answer, and nothing else."""

from __future__ import annotations

from pydantic import Field

from omnifleet_reward.scorer import Reply, Scorer, Verdict
from omnifleet_reward.scorers import format

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<SPECIAL_12>", "<eos>", "</s>")


class Params(format.Params):
    """Names of the two tags, and what may end a reply."""

    end_tokens: tuple[str, ...] = Field(END_TOKENS)
    """Tokens that are removed from the end, one at most."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 1 if the reply is: one think block, one non-empty answer block, white space around them; else 0; no opinion.

    One end token at the end is removed first. What the chat template opened counts as the reply's beginning.
    Examples: `<think>\\nx\\n</think>\\n<answer>9</answer>` → 1; the same behind a word, with two answers, or with an empty
    one → 0; `x</think><answer>9</answer>` → 1 behind a template that ends in `<think>`, else 0.
    """
    text = _opened(params.think_tag, reply.prompt_suffix) + _without_end(reply.response, params.end_tokens)
    return Verdict(float(_is_strict(text.strip(), params)))


def _is_strict(text: str, params: Params) -> bool:
    think, thought = f"<{params.think_tag}>", f"</{params.think_tag}>"
    answer, answered = f"<{params.answer_tag}>", f"</{params.answer_tag}>"
    if any(text.count(tag) != 1 for tag in (think, thought, answer, answered)):
        return False
    if not (text.startswith(think) and text.endswith(answered)):
        return False
    between = text[text.index(thought) + len(thought) : text.index(answer)] if thought in text else "?"
    inside = text[text.index(answer) + len(answer) : -len(answered)]
    in_order = text.index(think) < text.index(thought) < text.index(answer)
    return in_order and not between.strip() and bool(inside.strip())


def _opened(tag: str, prompt_suffix: str) -> str:
    at = prompt_suffix.rfind(f"<{tag}>")
    return prompt_suffix[at:] if at >= 0 else ""


def _without_end(text: str, tokens: tuple[str, ...]) -> str:
    text = text.rstrip()
    for token in tokens:
        if text.endswith(token):
            return text.removesuffix(token)
    return text


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """A complete reply."""
    return [Reply(format.examples(prompt_suffix, params)[0].response, "1", prompt_suffix=prompt_suffix)]


SCORER = Scorer(
    "strict_format",
    "1",
    "One think block, then one non-empty answer block, nothing else.",
    judge,
    Params,
    examples,
    format.wrap,
)
