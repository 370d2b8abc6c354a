"""Where the answer stands in a reply: in a tag, in the last box, after `Answer:`, or it is the whole reply."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from omnifleet.config.base import StrictModel

Place = Literal["tag", "box", "final", "fence", "text"]

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_FINAL = re.compile(r"\banswer\b[*_ \t]*(?:is\b[*_ \t]*:?|[:=-])[*_ \t]*(\S[^\n]*)", re.IGNORECASE)
_FENCE = re.compile(r"```[\w+-]*\n(.*?)\n?```", re.DOTALL)
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"
_WRAPPERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*\*([^*]+)\*\*\.?",
        r"\*([^*]+)\*",
        r"__([^_]+)__",
        r"`([^`]+)`",
        r"\$\$([^$]+)\$\$",
        r"\$([^$]+)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        _TEXT,
    )
)


class AnswerPlace(StrictModel):
    """Parameters of scorers that look for an answer."""

    places: tuple[Place, ...] = Field(("tag",), min_length=1)
    """Where to look, first found first: `tag`, `box` (last complete one), `final` (after the last `Answer:`), `fence`
    (last fenced block), `text` (the whole reply)."""
    answer_tag: str = Field("answer", min_length=1)
    """Tag around the final answer."""

    def find(self, text: str) -> str | None:
        """The answer, white space around it removed, or None."""
        for place in self.places:
            found = _find(place, text, self.answer_tag)
            if found is not None:
                return found.strip()
        return None

    def put(self, answer: str) -> str:
        """A reply that holds `answer` in the first of the places."""
        place = self.places[0]
        return {
            "tag": f"<{self.answer_tag}>{answer}</{self.answer_tag}>",
            "box": f"\\boxed{{{answer}}}",
            "final": f"Answer: {answer}",
            "fence": f"```\n{answer}\n```",
            "text": answer,
        }[place]


def _find(place: Place, text: str, tag: str) -> str | None:
    if place == "tag":
        return tagged(tag, text)
    if place == "box":
        return last_box(text)
    if place == "final":
        found = last_of(_FINAL, text)
        return None if found is None else found.strip("*_ \t")
    if place == "fence":
        return last_of(_FENCE, text)
    return text


def tagged(tag: str, text: str) -> str | None:
    """Content from the first <tag> to the last </tag> after it, or None."""
    _, opened, rest = text.partition(f"<{tag}>")
    content, closed, _ = rest.rpartition(f"</{tag}>")
    return content if opened and closed else None


def last_box(text: str) -> str | None:
    r"""Content of the last complete \boxed{…} or \fbox{…}, or None. One pass, however deep the braces."""
    found: tuple[int, int] | None = None
    opened: list[int] = []  # where a box's content starts; -1 for a bare brace
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token in ("\\{", "\\}"):
            continue
        if token == "}":
            start = opened.pop() if opened else -1
            if start >= 0 and (found is None or start > found[0]):
                found = (start, match.start())
        else:
            opened.append(match.end() if len(token) > 1 else -1)
    return text[found[0] : found[1]] if found else None


def last_of(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, or None."""
    found: str | None = None
    for match in pattern.finditer(text):
        found = match.group(1)
    return found


def unwrapped(text: str) -> str:
    r"""Without what stands around an answer: markdown, $…$, \(…\), \text{…}, a full stop."""
    text = text.strip()
    while True:
        inner = _inner(text.rstrip(".,; \n"))
        if inner == text:
            return text
        text = inner


def _inner(text: str) -> str:
    for wrapper in _WRAPPERS:
        match = wrapper.fullmatch(text)
        if match:
            return match.group(1).strip()
    return text


def thoughts(tag: str, prompt_suffix: str) -> Sequence[str]:
    """(before, after) of a reply's reasoning, as the template leaves it to the reply; ("", "") if it closed the tag."""
    opening, ending = f"<{tag}>", f"</{tag}>"
    if opening not in prompt_suffix:
        return opening, ending
    closed = prompt_suffix.rfind(ending) > prompt_suffix.rfind(opening)
    return ("", "") if closed else ("", ending)
