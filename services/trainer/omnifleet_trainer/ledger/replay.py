"""What a step was trained on, from the ledger alone, held against what the run said about that step at the time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.ledger.queries import LedgerReader, LedgerRow

_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Check:
    """One number of a step: from the ledger, and as metrics.jsonl has it (None: it does not)."""

    name: str
    ledger: float
    recorded: float | None

    @property
    def holds(self) -> bool:
        """True if both agree, or there is nothing to compare with."""
        return self.recorded is None or math.isclose(
            self.ledger, self.recorded, rel_tol=_CLOSE, abs_tol=_CLOSE
        )


def step_rows(reader: LedgerReader, step: int) -> list[LedgerRow]:
    """Trajectories that `step` trained, group after group. Raises NOT_FOUND if there are none."""
    rows = [row for row in reader.rows(state="consumed", step=step)]
    if not rows:
        raise OmnifleetError(
            Reason.NOT_FOUND, f"the ledger has nothing that step {step} trained", knob="--step"
        )
    return sorted(rows, key=lambda row: (row.group, row.sample))


def replay(rows: Iterable[LedgerRow], recorded: dict[str, float]) -> list[Check]:
    """Recompute what a step's record can be held to: samples, reward and its spread, reply lengths, lag."""
    rows = list(rows)
    rewards = [row.reward for row in rows]
    tokens = [row.tokens for row in rows]
    step = rows[0].step
    lags = [
        step - 1 - span.version.number
        for row in rows
        for span in row.spans
        for _ in range(span.start, span.end)
    ]
    checks = {
        "samples": float(len(rows)),
        "reward": sum(rewards) / len(rewards),
        "response_tokens": float(sum(tokens)),
        "response_tokens_max": float(max(tokens)),
        "lag_max": float(max(lags, default=0)),
        "lag_mean": sum(lags) / max(1, len(lags)),
    }
    return [Check(name, value, recorded.get(name)) for name, value in checks.items()]


def recorded_step(run_dir: Path, step: int) -> dict[str, float]:
    """Metrics of a step as the run wrote them; {} if it wrote none."""
    path = run_dir / "metrics.jsonl"
    found: dict[str, float] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            body = json.loads(line)
        except ValueError:
            continue  # the last line of a killed writer may be torn
        if body.get("step") == step:
            found = {name: float(value) for name, value in body.items() if isinstance(value, int | float)}
    return found
