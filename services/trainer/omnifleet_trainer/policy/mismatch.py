"""The sample on which trainer and engine differ most: kept as a picture and as numbers when a step's TMPE is high.

Source: NeMo RL plots the worst sample above a token_mult_prob_error of 1.05.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet_trainer.batch.samples import StepBatch, TrainingSample

THRESHOLD = 1.05
"""Mean multiplicative probability error of a step above which its worst sample is shown."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """row: of the step. error: mean exp|g - p|. generation, policy: probabilities of its trained tokens, [n] float64."""

    row: int
    error: float
    generation: npt.NDArray[np.float64]
    policy: npt.NDArray[np.float64]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Mismatch:
        """From the same fields as JSON."""
        sides = {name: np.asarray(body[name], np.float64) for name in ("generation", "policy")}
        return cls(row=body["row"], error=body["error"], **sides)


OnMismatch = Callable[[int, TrainingSample, Mismatch], None]
"""Step, sample, and how it differs."""


def report_worst(batch: StepBatch, found: Sequence[Mismatch], error: float, tell: OnMismatch) -> None:
    """Tell of the worst of `found`, if the step's error is above the threshold."""
    if found and error > THRESHOLD:
        worst = max(found, key=lambda mismatch: mismatch.error)
        tell(batch.step, batch.samples[worst.row], worst)


@dataclass(frozen=True, slots=True)
class MismatchPlots:
    """Writes `step-N.png` and `step-N.json` into a folder; the newest `kept` pairs stay."""

    folder: Path
    kept: int = 20

    def __call__(self, step: int, sample: TrainingSample, mismatch: Mismatch) -> None:
        """Draw one sample: probabilities on both sides, token by token, and their ratio."""
        from matplotlib.figure import Figure

        self.folder.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(9, 5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(mismatch.generation, label="engine", marker=".", linewidth=0.8)
        above.plot(mismatch.policy, label="trainer", marker=".", linewidth=0.8)
        above.set_ylabel("probability of the token")
        above.legend()
        below.semilogy(mismatch.policy / np.maximum(mismatch.generation, 1e-30), marker=".", linewidth=0.8)
        below.axhline(1.0, color="grey", linewidth=0.6)
        below.set_ylabel("trainer / engine")
        below.set_xlabel("trained token of the reply")
        figure.suptitle(f"step {step}, {sample.trajectory_id}: mean exp|g - p| = {mismatch.error:.3f}")
        path = self.folder / f"step-{step}.png"
        figure.savefig(path, dpi=100)
        body = {
            "step": step,
            "trajectory": sample.trajectory_id,
            "error": mismatch.error,
            "lag": sample.lag,
            "token_ids": sample.token_ids,
            "generation": mismatch.generation.tolist(),
            "policy": mismatch.policy.tolist(),
        }
        path.with_suffix(".json").write_text(json.dumps(body))
        self._prune()

    def _prune(self) -> None:
        pictures = sorted(
            self.folder.glob("step-*.png"), key=lambda path: int(path.stem.removeprefix("step-"))
        )
        for path in pictures[: -self.kept]:
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)
