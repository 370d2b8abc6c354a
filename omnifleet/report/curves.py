"""Curves of a run as one PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from omnifleet.report.records import RunRecords

_PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("reward", "rollouts"), ("heldout_reward", "held out"))),
    ("TMPE (1 = rollout and trainer agree)", (("tmpe", ""),)),
    ("lag, steps behind", (("lag_mean", "mean"), ("lag_max", "oldest token"))),
    ("entropy, nats", (("approx_entropy", ""),)),
    ("reply, tokens", (("response_tokens_mean", "mean"), ("response_tokens_p95", "95th percentile"))),
    ("norm of the gradient", (("grad_norm", ""),)),
    ("tokens/s", (("tokens_per_s", ""),)),
    (
        "share of a step",
        (
            ("wait_share", "waiting for replies"),
            ("train_share", "training"),
            ("engine_idle_share", "engines idle"),
        ),
    ),
    ("refit, ms", (("refit_ms", "whole refit"), ("gate_ms", "no token produced"))),
)
_COLUMNS = 3


def draw_curves(run: RunRecords, out: Path) -> Path:
    """Draw the run's curves into `out` (PNG); returns it. A panel without a number says so."""
    rows = -(-len(_PANELS) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(13, 3.1 * rows), constrained_layout=True)
    for axis, (title, series) in zip(axes.flat, _PANELS, strict=True):
        axis.set_title(title, fontsize=10, loc="left")
        _draw(axis, run, series)
    figure.suptitle(run.name, fontsize=11, x=0.01, ha="left")
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def _draw(axis: Axes, run: RunRecords, series: tuple[tuple[str, str], ...]) -> None:
    found = [(key, label, *run.series(key)) for key, label in series]
    found = [one for one in found if one[2]]
    for key, label, steps, values in found:
        lonely = key.startswith("heldout") or len(steps) == 1  # a line through one point is invisible
        axis.plot(steps, values, label=label, marker="o" if lonely else None, linewidth=1.5)
    if not found:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#5b6675")
        axis.set_axis_off()
        return
    axis.set_xlabel("step", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    if any(label for _, label, _, _ in found):
        axis.legend(fontsize=8, frameon=False)
