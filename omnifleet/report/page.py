"""The report of a run as one HTML file: curves, checks with their evidence, rollouts before and after, counters."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from omnifleet.report.records import RunRecords

_SHOWN_SAMPLES = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One claim about the run, whether it holds, and the numbers that show it."""

    claim: str
    ok: bool
    evidence: str


def write_page(
    run: RunRecords,
    out: Path,
    *,
    curves: Path,
    subtitle: str,
    checks: Sequence[Check],
    pictures: Mapping[str, bytes],
    counters: Mapping[str, float],
) -> Path:
    """Write the report to `out`. `pictures`: media digest -> PNG bytes for the sample rollouts."""
    environment = Environment(
        loader=PackageLoader("omnifleet.report", "."), autoescape=select_autoescape(("html", "j2"))
    )
    text = environment.get_template("page.html.j2").render(
        name=run.name,
        start=float(run.summary.get("heldout_start", 0.0)),
        end=float(run.summary.get("heldout_end", 0.0)),
        subtitle=subtitle,
        curves=base64.b64encode(curves.read_bytes()).decode(),
        checks=checks,
        samples=paired_samples(run.samples, pictures)[:_SHOWN_SAMPLES],
        counters=[(key, f"{value:,.10g}") for key, value in sorted(counters.items())],
    )
    out.write_text(text)
    return out


def sample_digests(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Media digests that the report shows."""
    return list(dict.fromkeys(d for s in samples for d in s.get("media", ())))


def paired_samples(
    samples: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """The same held-out prompt at the first and at the last evaluation, those that changed first."""
    if not samples:
        return []
    steps = [int(s["step"]) for s in samples]
    first = {s["prompt_id"]: s for s in samples if s["step"] == min(steps)}
    last = {s["prompt_id"]: s for s in samples if s["step"] == max(steps)}
    pairs = []
    for prompt_id in first.keys() & last.keys():
        before, after = first[prompt_id], last[prompt_id]
        digest = next(iter(after.get("media", ())), "")
        picture = pictures.get(digest)
        pairs.append(
            {
                "question": after["question"],
                "answer": after["answer"],
                "before": before["reply"],
                "before_reward": before["reward"],
                "after": after["reply"],
                "after_reward": after["reward"],
                "picture": base64.b64encode(picture).decode() if picture else "",
            }
        )
    pairs.sort(key=lambda p: (p["before_reward"] - p["after_reward"], p["question"]))
    # mostly what was learned, and honestly some that was not
    return pairs[:8] + pairs[::-1][:4] if len(pairs) > 12 else pairs
