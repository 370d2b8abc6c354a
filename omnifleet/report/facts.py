"""What any run can be asked: was every sample trained once, did both engines agree, how long did it take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.report.records import RunRecords
from omnifleet.telemetry.words import duration

MAX_TMPE = 1.05
"""From here on NeMo RL calls the engines different, too."""

_LEDGER: tuple[tuple[str, str], ...] = (
    ("prompts_leased", "prompts handed out"),
    ("attempts", "attempts at them"),
    ("trajectories", "replies kept"),
    ("consumed", "replies trained on"),
    ("consumed_twice", "replies trained on twice"),
    ("voided", "trained, undone by a resume from before it"),
    ("expired", "replies too old to train"),
    ("failed", "attempts that failed"),
    ("given_up", "prompts given up after so many"),
    ("ready", "groups ready to train"),
    ("in_flight", "prompts out now"),
    ("pending", "prompts still to come in this epoch"),
    ("lost", "prompts lost"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One claim about the run, whether it holds, and the numbers that show it."""

    claim: str
    ok: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A number as it is shown, and what it counts."""

    value: str
    words: str


def heldout(run: RunRecords) -> tuple[float, float] | None:
    """Held-out reward at the first and at the last evaluation; None if there was none."""
    _, values = run.series("heldout_reward")
    return (values[0], values[-1]) if values else None


def agreement(run: RunRecords, limit: float) -> Check:
    """Whether rollout and trainer gave each token the same probability: TMPE below `limit` in every step.

    Where they did not, it says whether numbers differ under the same weights, or the policy moved from the version that
    sampled to the one that was trained.
    """
    claim = f"rollout and trainer agree on logprobs: TMPE below {limit} in every step"
    steps, tmpe = run.series("tmpe")
    if not tmpe:
        return Check(claim, False, "never measured")
    highest, step = max(zip(tmpe, steps, strict=True))
    value = f"highest {highest:.5f}, step {step:.0f} of {len(tmpe)}"
    above = sum(x >= limit for x in tmpe)
    _, fresh = run.series("token_mult_prob_error_lag0")
    if above and fresh:
        cause = "the policy moved between versions" if max(fresh) < limit else "numbers differ"
        value += f"; {above} above; of tokens of the trained version itself at most {max(fresh):.5f}: {cause}"
    return Check(claim, highest < limit, value)


def run_checks(run: RunRecords, ledger: Mapping[str, Any]) -> list[Check]:
    """What must hold of every run. ledger: its counts, {} if nobody could be asked."""
    checks = []
    if run.series("tmpe")[1]:
        checks.append(agreement(run, MAX_TMPE))
    if ledger:
        checks.append(
            Check(
                "every trained reply came through the ledger exactly once, and no prompt was lost",
                int(ledger["consumed_twice"]) == 0 and int(ledger["lost"]) == 0,
                f"{ledger['consumed']:,} trained, {ledger['consumed_twice']} twice, {ledger['lost']} prompts lost",
            )
        )
    return checks


def ledger_facts(ledger: Mapping[str, Any]) -> list[Fact]:
    """The account in words; what is 0 is shown only where 0 is the point."""
    shown = [(name, words) for name, words in _LEDGER if name in ledger]
    telling = ("consumed", "consumed_twice", "lost")
    return [Fact(f"{ledger[name]:,}", words) for name, words in shown if ledger[name] or name in telling]


def training_facts(run: RunRecords) -> list[Fact]:
    """Sums and means over the steps that were trained."""
    trained = [step for step in run.steps if step.get("reward") is not None]
    if not trained:
        return []
    facts = [Fact(f"{len(trained):,}", "steps")]
    seconds = _sum(trained, "step_s")
    if seconds:
        waited = _sum(trained, "wait_s") / seconds
        facts.append(Fact(duration(seconds), f"in them, {waited:.0%} of it waiting for replies"))
    if tokens := _sum(trained, "response_tokens"):
        facts.append(Fact(f"{tokens:,.0f}", "tokens of replies trained"))
    refits = [step["refit_in_flight"] for step in run.steps if "refit_in_flight" in step]
    if refits:
        busy = sum(count > 0 for count in refits)
        facts.append(Fact(f"{len(refits):,}", f"refits, {busy:,} while replies were being written"))
    if groups := _sum(trained, "groups"):
        equal = _sum(trained, "zero_signal_groups") / groups
        facts.append(Fact(f"{equal:.0%}", "of groups had equal rewards and taught nothing"))
    _, lags = run.series("lag_max")
    if lags:
        facts.append(Fact(f"{max(lags):.0f}", "steps behind, the oldest token that was trained"))
    return facts


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(step.get(key) or 0.0) for step in steps)
