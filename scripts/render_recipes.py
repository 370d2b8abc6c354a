"""Write the tables of docs/recipes.md from tests/unit/reference_recipes.yaml, between its two marks. `--check` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "unit" / "reference_recipes.yaml"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- tables: scripts/render_recipes.py -->", "<!-- end of tables -->"
NONE = "–"
RECIPES = {
    "CA": "clevr-automodel",
    "MA": "mmpr-automodel",
    "CM": "clevr-megatron",
    "MM": "mmpr-megatron",
    "GS": "gym-video",
    "GA": "gym-video-async",
}
"""Our recipe in recipes/nemotron-omni for each of NeMo RL's."""


def rows() -> dict[str, list[dict[str, Any]]]:
    """Section -> rows, as the table has them."""
    body: dict[str, list[dict[str, Any]]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return body


def six(value: Any, row: dict[str, Any]) -> list[Any]:
    """A value for each recipe. A list of six is one each; anything else holds for all."""
    lists = row.get("field") == "bad_words" or (isinstance(value, list) and len(value) == len(RECIPES))
    return list(value) if lists else [value] * len(RECIPES)


def expected(row: dict[str, Any]) -> list[Any]:
    """What our six recipes must resolve to; NONE where there is nothing to compare."""
    reference = six(row["reference"], row)
    if "value" in row:
        return [
            NONE if theirs == NONE else ours
            for theirs, ours in zip(reference, six(row["value"], row), strict=True)
        ]
    words = row.get("as") or {}
    return [words.get(theirs, theirs) if _hashable(theirs) else theirs for theirs in reference]


def rendered() -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for section, found in rows().items():
        lines += [
            f"### {section}",
            "",
            "| NeMo RL | values | ours | ours differs: why |",
            "|---|---|---|---|",
        ]
        lines += [_line(row) for row in found] + [""]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    ours = f"`{row['ours']}`" if "ours" in row else NONE
    why = row.get("why", "")
    if "value" in row:
        why = f"{_shown(six(row['value'], row))}: {why}"
    elif row.get("as"):
        ours += ": " + _shown(expected(row))
    return f"| {row['field']} | {_shown(six(row['reference'], row))} | {ours} | {why} |"


def _shown(values: list[Any]) -> str:
    texts = [_text(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " · ".join(texts)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "+".join(str(item["name"]) for item in value)
    if isinstance(value, list):
        return "(" + ", ".join(_text(item) for item in value) + ")"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)


def page(text: str) -> str:
    """The page with fresh tables."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{rendered()}\n{END}{tail}"


def main() -> None:
    """Write, or say that the page is stale."""
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            raise SystemExit(f"{PAGE} is stale: run python {Path(__file__).relative_to(ROOT)}")
        return
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
