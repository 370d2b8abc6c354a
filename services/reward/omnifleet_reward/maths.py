r"""Do two pieces of mathematics say the same? Numbers, percent and lists here, everything else by math-verify.

math-verify 0.9 alone takes `456,78` for two numbers, refuses every percent form inside a box, and asks for signals, which
exist only on a main thread; so it is called without its own timeouts: the scorer process has limits that hold.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from omnifleet_reward.places import unwrapped

MOST_CHARACTERS = 2000
"""A final answer is short; a longer text is not parsed."""
_DECIMALS = 6  # decimals are compared as math-verify does: rounded to six places
_DEEPEST = 4  # lists in lists
_DEEPEST_BRACKETS = 40  # math-verify takes seconds for some hundred, and ends in the same "no"
_MOST_PARTS = 64

_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d{1,40})?(\.\d{1,40})?(?:[eE]([+-]?\d{1,2}))?")
_PERCENT = re.compile(r"\s*(?:\\?%|percent(?:age)?|pct)$", re.IGNORECASE)
_FRACTION = re.compile(
    r"([+-]?)\s*(?:\\[dt]?frac\s*\{\s*([+-]?\d{1,40})\s*\}\s*\{\s*(\d{1,40})\s*\}|(\d{1,40})\s*/\s*(\d{1,40}))"
)
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°|\\degree)$")
_NOISE = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])(?![A-Za-z])")
_CURRENCY = re.compile(r"^(?:\\?\$|[€£¥])(?=[\d.])")
_AND = re.compile(r"\s(?:and|or)\s")


@dataclass(frozen=True, slots=True)
class Number:
    """value: before the percent sign. exact: written without a decimal point."""

    value: Fraction
    percent: bool
    exact: bool

    def meanings(self) -> tuple[Fraction, ...]:
        """x% is x/100, and a bare x is taken for it too."""
        return (self.value / 100, self.value) if self.percent else (self.value,)


@dataclass(frozen=True, slots=True)
class Listing:
    """brackets: "()", "[]", "(]", "[)", "{}" or "" for a bare list."""

    brackets: str
    parts: tuple[str, ...]


def prepare() -> None:
    """Import SymPy and math-verify, and let them build their tables."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nobody but us watches the time
    _by_math_verify("x^2+1", r"\frac{2x^2+2}{2}")


def same(truth: str, answer: str) -> bool | None:
    """True or False; None if the answer is no mathematics that can be read."""
    if len(answer) > MOST_CHARACTERS or _depth(answer) > _DEEPEST_BRACKETS:
        return None
    return _same(_plain(truth), _plain(answer), 0)


def _same(truth: str, answer: str, depth: int) -> bool | None:
    if not answer:
        return None
    if truth == answer:
        return True
    known, given = number(truth), number(answer)
    if known and given:
        return equal(known, given)
    known_list, given_list = listing(truth), listing(answer)
    if known_list and given_list and depth < _DEEPEST:
        return _same_lists(known_list, given_list, depth + 1)
    return _by_math_verify(truth, answer)


def number(text: str) -> Number | None:
    r"""A plain number: 12, -1,234.5, .5, 1e-3, 3/4, \frac{3}{4}, any of them with a percent sign; else None."""
    bare = _PERCENT.sub("", text)
    percent = bare != text
    fraction = _FRACTION.fullmatch(bare)
    if fraction:
        sign, top, bottom, above, below = fraction.groups()
        denominator = int(bottom or below)
        if not denominator:
            return None
        value = Fraction(int(top or above), denominator)
        return Number(-value if sign == "-" else value, percent, exact=True)
    match = _NUMBER.fullmatch(bare)
    if not match or not (match.group(2) or match.group(3)):
        return None
    sign, whole, decimals, exponent = match.groups()
    value = Fraction((whole or "0").replace(",", "") + (decimals or "")) * Fraction(10) ** int(exponent or 0)
    return Number(-value if sign == "-" else value, percent, exact=decimals is None)


def equal(truth: Number, answer: Number) -> bool:
    """35% is 35%, 0.35 and 35; 1/3 is 0.333333."""
    if truth.percent and answer.percent:
        return truth.value == answer.value
    exact = truth.exact and answer.exact

    def close(a: Fraction, b: Fraction) -> bool:
        return a == b if exact else round(a, _DECIMALS) == round(b, _DECIMALS)

    return any(close(a, b) for a in truth.meanings() for b in answer.meanings())


def listing(text: str) -> Listing | None:
    """A list in brackets or bare, if the text is one."""
    braces = text.startswith("\\{") and text.endswith("\\}")
    if braces:
        brackets, inner = "{}", text[2:-2]
    elif len(text) > 2 and text[0] in "([{" and text[-1] in ")]}":
        brackets, inner = text[0] + text[-1], text[1:-1]
    else:
        brackets, inner = "", text
    parts = _split(inner)
    if parts is None and brackets:  # (1)+(2) starts and ends with brackets that are not a pair
        brackets, parts = "", _split(text)
    if parts is None or not (1 < len(parts) <= _MOST_PARTS) or not all(parts):
        return None
    return Listing(brackets, tuple(parts))


def _depth(text: str) -> int:
    """Most brackets that are open at once."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _split(text: str) -> list[str] | None:
    """Parts between commas outside of brackets; None if brackets do not match."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character in ",;" and not depth:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    if len(parts) == 1 and not depth:
        parts = _AND.split(text)
    return None if depth else [part.strip() for part in parts]


def _same_lists(truth: Listing, answer: Listing, depth: int) -> bool:
    if len(truth.parts) != len(answer.parts):
        return False
    bare_or_set = ("", "{}")
    if truth.brackets in bare_or_set and answer.brackets in bare_or_set:
        return _same_sets(truth.parts, answer.parts, depth)
    one_is_bare = "" in (truth.brackets, answer.brackets)
    if not one_is_bare and truth.brackets != answer.brackets:
        return False
    pairs = zip(truth.parts, answer.parts, strict=True)
    return all(_same(known, given, depth) is True for known, given in pairs)


def _same_sets(truth: tuple[str, ...], answer: tuple[str, ...], depth: int) -> bool:
    left = list(answer)
    for known in truth:
        match = next((given for given in left if _same(known, given, depth) is True), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _by_math_verify(truth: str, answer: str) -> bool | None:
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    known = parse(_boxed(truth), (LatexExtractionConfig(),), parsing_timeout=None)
    given = parse(_boxed(answer), (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None)
    if verify(known, given, timeout_seconds=None):
        return True
    return False if any(not isinstance(value, str) for value in given) else None


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _plain(text: str) -> str:
    text = unwrapped(text).replace("{,}", ",").replace("−", "-").replace("\\%", "%")
    text = _CURRENCY.sub("", text)
    return unwrapped(_DEGREES.sub("", _NOISE.sub("", text).strip()))
