"""Curves of a run as one PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from omnifleet.report.records import RunRecords

_PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("reward", "rollouts (temperature 1)"), ("heldout_reward", "held out (greedy)"))),
    ("TMPE (1 = rollout and trainer agree)", (("tmpe", ""),)),
    ("lag, steps behind", (("lag_mean", "mean"), ("lag_max", "oldest token"))),
    ("entropy, nats", (("approx_entropy", ""),)),
    ("tokens/s", (("tokens_per_s", ""),)),
    ("refit, ms", (("refit_ms", "whole refit"), ("gate_ms", "no token produced"))),
)


def draw_curves(run: RunRecords, out: Path) -> Path:
    """Draw the run's curves into `out` (PNG); returns it."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.2), constrained_layout=True)
    for axis, (title, series) in zip(axes.flat, _PANELS, strict=True):
        for key, label in series:
            steps, values = run.series(key)
            marker = "o" if key.startswith("heldout") else None
            axis.plot(steps, values, label=label, marker=marker, linewidth=1.5)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        if any(label for _, label in series):
            axis.legend(fontsize=8, frameon=False)
    figure.suptitle(run.name, fontsize=11, x=0.01, ha="left")
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out
