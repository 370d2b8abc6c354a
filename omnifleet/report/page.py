"""The report of a run as one HTML file: curves, checks with their evidence, the ledger, sample rollouts, counters."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from omnifleet.report.facts import Check, heldout, ledger_facts, training_facts
from omnifleet.report.records import RunRecords
from omnifleet.telemetry.words import told

_SHOWN_SAMPLES = 12
_SHOWN_PICTURES = 4


def write_page(
    run: RunRecords,
    out: Path,
    *,
    curves: Path,
    subtitle: str,
    checks: Sequence[Check],
    ledger: Mapping[str, Any],
    pictures: Mapping[str, bytes],
    counters: Mapping[str, float],
) -> Path:
    """Write the report to `out`.

    ledger: counts by name. pictures: media digest -> PNG bytes for the sample rollouts. counters: "<service> <name>" -> number.
    """
    environment = Environment(
        loader=PackageLoader("omnifleet.report", "."), autoescape=select_autoescape(("html", "j2"))
    )
    samples = paired_samples(run.samples, pictures)[:_SHOWN_SAMPLES]
    text = environment.get_template("page.html.j2").render(
        name=run.name,
        title=_title(run),
        subtitle=subtitle,
        curves=base64.b64encode(curves.read_bytes()).decode(),
        checks=checks,
        training=training_facts(run),
        ledger=ledger_facts(ledger),
        samples=samples,
        evaluations=_evaluations(run.samples),
        lacking=sum(sample["lacking"] for sample in samples),
        counters={who: told(own, zeros=True) for who, own in _by_service(counters).items()},
    )
    out.write_text(text)
    return out


def sample_digests(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Media digests that the report may show."""
    return list(dict.fromkeys(d for s in samples for d in s.get("media", ())[:_SHOWN_PICTURES]))


def paired_samples(
    samples: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """The same held-out prompt at the first and at the last evaluation, those that changed first."""
    if not samples:
        return []
    begun, ended = _evaluations(samples)
    first = {s["prompt_id"]: s for s in samples if s["step"] == begun}
    last = {s["prompt_id"]: s for s in samples if s["step"] == ended}
    pairs = []
    for prompt_id in first.keys() & last.keys():
        before, after = first[prompt_id], last[prompt_id]
        digests = after.get("media", ())[:_SHOWN_PICTURES]
        pairs.append(
            {
                "question": after["question"],
                "answer": after["answer"],
                "before": before["reply"],
                "before_reward": before["reward"],
                "after": after["reply"],
                "after_reward": after["reward"],
                "pictures": [base64.b64encode(pictures[d]).decode() for d in digests if d in pictures],
                "lacking": sum(d not in pictures for d in digests),
            }
        )
    pairs.sort(key=lambda p: (p["before_reward"] - p["after_reward"], p["question"]))
    # mostly what was learned, and honestly some that was not
    return pairs[:8] + pairs[::-1][:4] if len(pairs) > 12 else pairs


def _evaluations(samples: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Steps of the first and of the last evaluation."""
    steps = [int(sample["step"]) for sample in samples] or [0]
    return min(steps), max(steps)


def _title(run: RunRecords) -> str:
    scores = heldout(run)
    if scores is None:
        return f"{run.name}: not scored yet"
    first, last = scores
    if len(run.series("heldout_reward")[0]) == 1:
        return f"{run.name}: held-out reward {first:.2f} before training"
    return f"{run.name}: held-out reward {first:.2f} → {last:.2f}"


def _by_service(counters: Mapping[str, float]) -> dict[str, dict[str, float]]:
    services: dict[str, dict[str, float]] = {}
    for key, value in sorted(counters.items()):
        who, _, name = key.partition(" ")
        services.setdefault(who, {})[name] = value
    return services
