"""The demo's report: claims with the numbers that show them, taken from the ledger, the services' counters and the control."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from omnifleet.cli.control import control_dir
from omnifleet.cli.report import write_report
from omnifleet.config.recipe import Recipe
from omnifleet.report.facts import Check, agreement
from omnifleet.report.lives import living, read_lives
from omnifleet.report.records import RunRecords, read_mapping, read_run

MIN_END, MIN_RISE, MAX_BLIND, MAX_CONTROL, MAX_TMPE, MIN_REFITS = 0.75, 0.2, 0.5, 0.05, 1.02, 20


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What to print at the end, and how many claims do not hold."""

    text: str
    failing: int


def write_demo_report(run_dir: Path, recipe: Recipe, seconds: float) -> DemoReport:
    """Write curves.png, report.html and checks.json into the run's folder."""
    run = read_run(run_dir)
    lives = read_lives(run_dir)
    checks = demo_checks(run, recipe, read_mapping(control_dir(run_dir) / "summary.json"), living(lives))
    written = write_report(
        run_dir, recipe, subtitle=_subtitle(run, recipe, seconds), checks=checks, lives=lives
    )
    (run_dir / "checks.json").write_text(json.dumps([asdict(check) for check in checks], indent=1))
    lines = [*map(_line, checks), f"report: {written.page}", f"curves: {written.curves}"]
    return DemoReport("\n".join(lines), sum(not check.ok for check in checks))


def demo_checks(
    run: RunRecords, recipe: Recipe, control: dict[str, Any], counters: dict[str, float]
) -> list[Check]:
    """What a reader should be able to trust, and why. `control`: summary of the learning-rate-0 run, {} if there is none."""
    s = run.summary
    start, end = float(s["heldout_start"]), float(s["heldout_end"])
    blind = {name: float(score) for name, score in s.get("controls", {}).items()}
    checks = [
        Check(
            f"held-out reward rises by at least {MIN_RISE} to at least {MIN_END}",
            end - start >= MIN_RISE and end >= MIN_END,
            f"{start:.3f} → {end:.3f} on {recipe.evaluation.size} unseen scenes, greedy",
        ),
        Check(
            f"the model looks: without or with wrong pictures at most {MAX_BLIND}",
            bool(blind) and max(blind.values()) <= MAX_BLIND,
            ", ".join(f"{name} pictures {score:.3f}" for name, score in blind.items()),
        ),
    ]
    if control:
        rise = float(control["heldout_end"]) - float(control["heldout_start"])
        checks.append(
            Check(
                f"the rise comes from training: with learning rate 0 it is below {MAX_CONTROL}",
                abs(rise) < MAX_CONTROL,
                f"{control['heldout_start']:.3f} → {control['heldout_end']:.3f} after {control['steps']} steps",
            )
        )
    return [*checks, *_numeric_checks(run, recipe), *media_checks(counters)]


def _numeric_checks(run: RunRecords, recipe: Recipe) -> list[Check]:
    s, ledger = run.summary, run.summary["ledger"]
    expected = int(s["steps"]) * recipe.trainer.prompts_per_step * recipe.trainer.generations_per_prompt
    return [
        agreement(run, MAX_TMPE),
        Check(
            f"weights went back while work went on: at least {MIN_REFITS} refits, some with requests in flight",
            int(s["refits"]) >= MIN_REFITS and int(s["refits_with_requests_in_flight"]) > 0,
            f"{s['refits']} refits, {s['refits_with_requests_in_flight']} with requests in flight",
        ),
        Check(
            "every trained sample came through the ledger exactly once",
            int(ledger["consumed"]) == expected and int(ledger["consumed_twice"]) == 0,
            f"{ledger['consumed']} consumed = {s['steps']} steps x {expected // max(1, int(s['steps']))} samples, "
            f"{ledger['consumed_twice']} twice",
        ),
    ]


def media_checks(counters: dict[str, float]) -> list[Check]:
    """A picture is decoded and preprocessed once a fleet, moves once a host, and is encoded once a worker."""
    objects = counters.get("media objects", 0)
    encoded = {k: v for k, v in counters.items() if k.endswith(" encoder_items")}
    sent = {k: v for k, v in counters.items() if k.endswith(" pictures_sent")}
    return [
        Check(
            "a picture is decoded and preprocessed once per fleet",
            0 < objects == counters.get("media decodes") == counters.get("media segments_computed"),
            f"{objects:.0f} pictures, {counters.get('media decodes', 0):.0f} decodes, "
            f"{counters.get('media segments_computed', 0):.0f} preprocessings for "
            f"{counters.get('media puts', 0):.0f} uploads and {counters.get('media segments_served', 0):.0f} uses",
        ),
        Check(
            "its bytes move once per host: services map shared memory",
            counters.get("media bytes_streamed", 1) == 0 and counters.get("media shm_maps", 0) > 0,
            f"{counters.get('media bytes_received', 0):,.0f} bytes uploaded, "
            f"{counters.get('media bytes_streamed', 0):,.0f} copied out, {counters.get('media shm_maps', 0):.0f} maps",
        ),
        Check(
            "it is encoded once per worker and encoder epoch",
            bool(encoded)
            and all(encoded[f"{k.split()[0]} encoder_items"] == v <= objects for k, v in sent.items()),
            "; ".join(
                f"{k.split()[0]}: {v:.0f} pictures of {objects:.0f} reached its engine, "
                f"{encoded[f'{k.split()[0]} encoder_items']:.0f} encoder runs"
                for k, v in sent.items()
            )
            + " (the encoder is frozen: one epoch)",
        ),
    ]


def _subtitle(run: RunRecords, recipe: Recipe, seconds: float) -> str:
    warm = read_mapping(Path(recipe.model.path) / "warmstart.json")
    seeds = read_mapping(Path(str(files("omnifleet.report") / "demo_seeds.json")))
    parts = [
        f"asynchronous GRPO on this machine's CPU: {run.summary['steps']} steps, seed {recipe.run.seed}, {seconds:.0f} s in all",
        f"warm start {warm.get('seconds', 0):.0f} s to held-out {warm.get('greedy', 0):.2f}; its last lesson is a teacher "
        "who often errs, so part of the climb is unlearning him",
    ]
    if seeds:
        parts.append(
            f"median of {len(seeds['seeds'])} seeds, measured {seeds['date']}: {seeds['start']:.2f} → {seeds['end']:.2f}"
        )
    return "; ".join(parts)


def _line(check: Check) -> str:
    mark = "[green]holds[/green]" if check.ok else "[red]FAILS[/red]"
    return f"  {mark}  {check.claim}: {check.evidence}"
