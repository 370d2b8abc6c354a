"""The report of a run as one HTML file: curves, checks with their evidence, the ledger, sample rollouts, counters."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from omnifleet.report.facts import Check, heldout, ledger_facts, training_facts
from omnifleet.report.lives import Life, added_up
from omnifleet.report.records import RunRecords
from omnifleet.telemetry.words import Told, told

_SHOWN_SAMPLES = 12
_SHOWN_PICTURES = 4
_NOBODY = Life("", "", 0.0)  # has no level: what stands beside the sums of all workers
_OF_GONE = ("samples_finished", "samples_failed", "tokens_generated", "refits")


@dataclass(frozen=True, slots=True)
class Counted:
    """What one service or worker counted. note: whose sums these are, if not one process's."""

    who: str
    note: str
    rows: list[Told]


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker that is no longer there: how it ended, and what it had done."""

    who: str
    ended: str
    rows: list[Told]


def write_page(
    run: RunRecords,
    out: Path,
    *,
    curves: Path,
    subtitle: str,
    checks: Sequence[Check],
    ledger: Mapping[str, Any],
    pictures: Mapping[str, bytes],
    lives: Sequence[Life],
) -> Path:
    """Write the report to `out`.

    ledger: counts by name. pictures: media digest -> PNG bytes for the sample rollouts. lives: of the run's processes,
    oldest first.
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
        counted=counted(lives),
        gone=gone_workers(lives),
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


def counted(lives: Sequence[Life]) -> list[Counted]:
    """Each service and each worker that serves, then all workers together if some are gone."""
    shown, by_who = [], {life.who: [one for one in lives if one.who == life.who] for life in lives}
    for who in sorted(by_who, key=_place):
        own = by_who[who]
        if not own[0].is_worker:
            ends = dict.fromkeys(life.ended for life in own[:-1])
            note = f"{len(own)} processes, one after the other: the former {', '.join(ends)}" if ends else ""
            shown.append(Counted(who, note, told(added_up(own), zeros=True)))
        elif here := [life for life in own if not life.ended]:
            shown.append(Counted(who, "", told(added_up(here), zeros=True)))
    workers = [life for life in lives if life.is_worker]
    if any(life.ended for life in workers):
        grown = added_up([*workers, _NOBODY])
        shown.append(Counted("all workers", f"{len(workers)} processes", told(grown, zeros=True)))
    return shown


def gone_workers(lives: Sequence[Life]) -> list[Gone]:
    """Workers that left the fleet, or were lost."""
    return [
        Gone(life.who, life.ended, [told({n: life.counters.get(n, 0.0)}, zeros=True)[0] for n in _OF_GONE])
        for life in lives
        if life.is_worker and life.ended
    ]


def _place(who: str) -> tuple[str, int]:
    name, _, number = who.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (who, 0)
