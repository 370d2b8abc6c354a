"""`click`: does the first click land in the circle? NeMo Gym's circle_click, on text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from omnifleet.errors import invalid
from omnifleet_reward.scorer import UNPARSEABLE, NoParams, Reply, Scorer, Verdict, right_or_wrong

Point = tuple[int, int]

_NUMBER = r"[\"']?(-?\d{1,9}(?:\.\d{1,9})?)[\"']?"
_CALL = re.compile(rf"\bclick\s*\(\s*(?:x\s*=\s*)?{_NUMBER}\s*,\s*(?:y\s*=\s*)?{_NUMBER}\s*\)")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=click>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(rf"<parameter=(x|y)>\s*{_NUMBER}\s*</parameter>")


def judge(reply: Reply, params: NoParams) -> Verdict:
    """score = 1 if √((x − cx)² + (y − cy)²) ≤ r for the first click (x, y), cut to integers; else 0.

    A click is `click(x, y)`, a JSON tool call {"name": "click", "arguments": {"x": …, "y": …}}, alone or in <tool_call>, or
    <function=click><parameter=x>…. No click, or a first one that cannot be read, is 0 and unparseable. The circle is the row's
    extra.circles entry whose color is extra.target_color, else the reference as JSON: {"x": …, "y": …, "radius": …}.

    Examples (circle 500, 500, 60): `click(530, 540)` → 1; `click(560, 500)` → 1; `click(561, 500)` → 0; `there` → 0.
    """
    circle = _circle(reply)
    click = _first_click(reply.response)
    if click is None:
        return UNPARSEABLE
    return right_or_wrong(math.hypot(click[0] - circle[0], click[1] - circle[1]) <= circle[2])


def _circle(reply: Reply) -> tuple[float, float, float]:
    circles = reply.extra.get("circles")
    found: Any = None
    if circles:
        wanted = reply.extra.get("target_color")
        found = next((circle for circle in circles if circle.get("color") == wanted), None)
    else:
        try:
            found = json.loads(reply.ground_truth)
        except ValueError:
            found = None
    try:
        return float(found["x"]), float(found["y"]), float(found["radius"])
    except (TypeError, KeyError, ValueError):
        raise invalid(
            "the row names no circle: extra.circles with extra.target_color, or x, y, radius as reference"
        ) from None


def _first_click(text: str) -> Point | None:
    """The click that stands first, whatever its notation."""
    found: list[tuple[int, Point | None]] = []
    if match := _CALL.search(text):
        found.append((match.start(), _point(match.groups())))
    for match in _TOOL_CALL.finditer(text):
        if '"click"' in match.group(1):
            found.append((match.start(), _from_json(match.group(1))))
            break
    if match := _FUNCTION.search(text):
        named = dict(_PARAMETER.findall(match.group(1)))
        found.append((match.start(), _point((named.get("x"), named.get("y")))))
    if not found:
        return _from_json(text)
    return min(found, key=lambda pair: pair[0])[1]


def _from_json(text: str) -> Point | None:
    try:
        call = json.loads(text)
        if call["name"] != "click":
            return None
        arguments = call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return _point((arguments["x"], arguments["y"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _point(values: tuple[Any, ...]) -> Point | None:
    try:
        x, y = (int(float(value)) for value in values)
    except (TypeError, ValueError, OverflowError):
        return None
    return x, y


def examples(prompt_suffix: str, params: NoParams) -> list[Reply]:
    """The middle of the circle."""
    circle: Mapping[str, int] = {"x": 500, "y": 500, "radius": 60}
    return [Reply("click(500, 500)", json.dumps(circle))]


SCORER = Scorer("click", "1", "First click lands in the target circle.", judge, NoParams, examples)
