"""`mcqa`: did the reply choose the right option? All grading modes of NeMo Gym's mcqa server, and one for free text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

from omnifleet.config.base import StrictModel
from omnifleet.errors import invalid
from omnifleet_reward.places import unwrapped
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong
from omnifleet_reward.scorers.geo3k import boxed

Mode = Literal[
    "strict_single_letter_boxed",
    "lenient_boxed",
    "lenient_answer_colon",
    "lenient_answer_colon_md",
    "free_letter",
]
Options = Mapping[str, str]

_LONE = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")
_LABEL = re.compile(r"\s*([A-Z])\s*[:).\-]")
_TEXT = re.compile(r"\\text\{\s*(.*?)\s*\}", re.DOTALL)
_COLON = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)
_COLON_MD = re.compile(r"[*_]{0,2}answer[*_]{0,2}\s*:[*_\s]{0,2}(.+)", re.IGNORECASE)
_LEADING = re.compile(r"([A-Za-z])(?![A-Za-z0-9])")
_ALONE = re.compile(r"(?<![A-Za-z])([A-Za-z])(?![A-Za-z])")
_CAPITAL = re.compile(r"\b[A-Z]\b")
_BETWEEN = re.compile(r"\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+", re.IGNORECASE)
_SIGNS = "*_` \t\n\r.,;:"
_OTHER_SCRIPTS = str.maketrans(
    {"أ": " A", "ب": " B", "ج": " C", "د": " D", "অ": " A", "ব": " B", "ড": " C", "ঢ": " D"}
)
_ANCHORED = re.compile(
    r"\b(?:answer|choice|option|choose|pick|select)\b(?:\s+(?:is|option|answer|choice))*\s*[:=–—-]?[\s*_$([`\\]*"
    r"(?:text\{|boxed\{)?([A-Z])(?![A-Za-z'’])",
)
_CAPITAL_OR_ARTICLE = re.compile(r"(?<![A-Za-z'’])([A-Z])(?![A-Za-z'’])(\s+[a-z])?")


class Params(StrictModel):
    """How the choice is read."""

    grading_mode: Mode | None = None
    """Overrides the row's extra.grading_mode; where both are absent: strict_single_letter_boxed."""


def judge(reply: Reply, params: Params) -> Verdict:
    r"""score = 1 if the chosen letter is the reference, else 0; no letter to be read → 0, unparseable.

    The row gives extra.options, [{"A": "cat"}, {"B": "dog"}]; extra.template_metadata.output_regex, one or several patterns
    whose last match is tried before the mode; and template_metadata.answer_prefix for the last-but-one mode.

    - strict_single_letter_boxed: in the last `\boxed{…}`, \text{} removed, a lone capital among non-letters, or a capital before
      `:`, `)`, `.` or `-`. `\boxed{[C]}` → C; `\boxed{B: dog}` → B; `\boxed{dog}` → nothing.
    - lenient_boxed: that, else the one option whose text is in the box. `\boxed{a dog}` → B.
    - lenient_answer_colon: behind the first `Answer:`, the letter alone or the option's text alone.
    - lenient_answer_colon_md: behind the last `Answer:` that names one option, markdown allowed. `**Answer: C**` → C;
      `Answer: A or B` → nothing.
    - free_letter (ours): the box, else the reply if it is one letter, else the letter behind the last answer, choice, option
      or pick, else the last capital that is no article. `My choice is C, given a red door.` → C; `Answer - **D**` → D.
    """
    options = _options(reply.extra)
    text = reply.response.strip()
    template = reply.extra.get("template_metadata") or {}
    chosen = _by_patterns(text, template.get("output_regex"), options)
    if chosen is None:
        if not options:
            raise invalid("extra.options is missing or empty: there is nothing to choose from")
        mode = params.grading_mode or reply.extra.get("grading_mode") or "strict_single_letter_boxed"
        if mode not in _MODES:
            raise invalid(f"extra.grading_mode {mode!r} is not one of {', '.join(_MODES)}")
        chosen = _MODES[mode](text, options, template.get("answer_prefix") or "")
    return UNPARSEABLE if chosen is None else right_or_wrong(chosen == reply.ground_truth.strip().upper())


def _options(extra: Mapping[str, Any]) -> Options:
    """LETTER -> text, nulls left out."""
    return {
        key.upper(): value
        for entry in extra.get("options") or ()
        for key, value in entry.items()
        if len(key) == 1 and key.isalpha() and value is not None
    }


def _by_patterns(text: str, patterns: str | list[str] | None, options: Options) -> str | None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            found = re.findall(pattern, text, re.IGNORECASE)
        except re.error as error:
            raise invalid(f"output_regex {pattern!r}: {error}") from None
        if not found:
            continue
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        captured = _latin(last).upper()
        chosen = captured if len(captured) == 1 and captured.isalpha() else _by_text(captured, options)
        if chosen is not None:
            return chosen
    return None


def _strict_boxed(text: str, options: Options, prefix: str = "") -> str | None:
    inner = boxed(text)
    if inner is None:
        return None
    inner = _without_text(inner)
    match = _LONE.fullmatch(inner) or _LABEL.match(inner)
    return match.group(1) if match and match.group(1) in options else None


def _lenient_boxed(text: str, options: Options, prefix: str) -> str | None:
    letter = _strict_boxed(text, options)
    inner = boxed(text)
    if letter is not None or inner is None:
        return letter
    seen = (_joined(inner), _joined(_without_text(inner)))
    matches = {
        letter
        for letter, option in options.items()
        if _joined(option) and any(_joined(option) in part for part in seen)
    }
    return matches.pop() if len(matches) == 1 else None


def _answer_colon(text: str, options: Options, prefix: str) -> str | None:
    match = _COLON.search(text)
    if not match:
        return None
    answer = _without_text(match.group(1)).strip()
    return answer.upper() if len(answer) == 1 and answer.upper() in options else _by_text(answer, options)


def _answer_colon_md(text: str, options: Options, prefix: str) -> str | None:
    normal = unicodedata.normalize("NFKC", text)
    found = [(match.start(), match.group(1)) for match in _COLON_MD.finditer(normal)]
    if prefix:
        pattern = re.compile(re.escape(unicodedata.normalize("NFKC", prefix)) + r"\s*([^\n]*)", re.IGNORECASE)
        found += [(match.start(), match.group(1)) for match in pattern.finditer(normal)]
    for _, payload in sorted(found, reverse=True):
        letter = _one_letter(payload, options)
        if letter is not None:
            return letter
    return _strict_boxed(text, options) if prefix else None


def _one_letter(payload: str, options: Options) -> str | None:
    """The one option that a payload names, None where it lists several."""
    payload = _latin(payload).strip(_SIGNS)
    named = [match for match in _ALONE.finditer(payload) if match.group(1).upper() in options]
    for left, right in pairwise(named):
        listed = _BETWEEN.fullmatch(payload[left.end() : right.start()])
        if listed and left.group(1).upper() != right.group(1).upper():
            return None
    leading = _LEADING.match(payload)
    if leading:
        letter = leading.group(1).upper()
    else:
        capitals = _CAPITAL.findall(payload)
        letter = capitals[-1] if capitals else ""
    return letter if letter in options else None


def _free_letter(text: str, options: Options, prefix: str) -> str | None:
    letter = _strict_boxed(text, options)
    if letter is not None:
        return letter
    alone = unwrapped(text).strip("()[]. ")
    if len(alone) == 1 and alone.upper() in options:
        return alone.upper()
    anchored = [m.group(1) for m in _ANCHORED.finditer(_lowered_words(text)) if m.group(1) in options]
    if anchored:
        return anchored[-1]
    capitals = [
        match.group(1)
        for match in _CAPITAL_OR_ARTICLE.finditer(text)
        if match.group(1) in options and not (match.group(1) in "AI" and match.group(2))
    ]
    return capitals[-1] if capitals else None


def _lowered_words(text: str) -> str:
    """Words in small letters, single capitals as they are."""
    return re.sub(r"[A-Za-z]{2,}", lambda match: match.group().lower(), text)


_MODES: Mapping[str, Callable[[str, Options, str], str | None]] = {
    "strict_single_letter_boxed": _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
    "lenient_answer_colon_md": _answer_colon_md,
    "free_letter": _free_letter,
}


def _by_text(text: str, options: Options) -> str | None:
    return next((letter for letter, option in options.items() if _joined(option) == _joined(text)), None)


def _without_text(text: str) -> str:
    while match := _TEXT.fullmatch(text):
        text = match.group(1)
    return text


def _latin(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_OTHER_SCRIPTS).strip()


def _joined(text: str) -> str:
    return " ".join(text.lower().split())


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The right letter, where the mode looks for it."""
    colon = params.grading_mode in ("lenient_answer_colon", "lenient_answer_colon_md")
    extra = {"options": [{"A": "yes"}, {"B": "no"}]}
    return [Reply("Answer: A" if colon else "\\boxed{A}", "A", extra=extra)]


SCORER = Scorer(
    "mcqa", "1", "Chosen option is the reference, in five grading modes.", judge, Params, examples, beyond=0.0
)
