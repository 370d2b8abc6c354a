"""The live table of a training run: reads the metrics file, so that it can come and go as it likes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from omnifleet.cli.where import is_up
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.supervisor import last_line, read_state
from omnifleet.report.records import read_run

_TICK_S = 0.25
_ROWS = 12
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("held out", "heldout_reward", "{:.3f}"),
    ("TMPE", "tmpe", "{:.4f}"),
    ("gen KL", "gen_kl_error", "{:.1e}"),
    ("entropy", "approx_entropy", "{:.2f}"),
    ("lag", "lag_mean", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
    ("step s", "step_s", "{:.1f}"),
    ("refit ms", "refit_ms", "{:.0f}"),
    ("gate ms", "gate_ms", "{:.0f}"),
    ("in flight", "refit_in_flight", "{:.0f}"),
)


LEGEND = (
    "held out: reward on unseen rows · TMPE: 1 = rollout and trainer agree on every logprob · lag: steps between the weights "
    "that made a token and those it trains · gate: longest time without a token in a refit"
)


def watch_training(run_dir: Path, steps: int, console: Console, *, title: str = "") -> bool:
    """Show progress until the trainer is done (True) or has failed for good (False)."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = progress.add_task(title or run_dir.name, total=steps)
    if not console.is_terminal:
        return _watch(run_dir, _LinePrinter(console).show)
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def draw(rows: list[dict[str, Any]]) -> None:
            progress.update(task, completed=rows[-1]["step"] if rows else 0)
            shown = [row for row in rows[:-_ROWS] if "heldout_reward" in row] + rows[-_ROWS:]
            live.update(
                Group(
                    metrics_table(shown) if rows else "waiting for the first weights and the first score",
                    progress,
                )
            )

        return _watch(run_dir, draw)


def metrics_table(rows: list[dict[str, Any]]) -> Table:
    """Steps as rows; a metric that a step does not have stays empty."""
    table = Table(caption=LEGEND, caption_justify="left")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(row, key, form) for _, key, form in COLUMNS))
    return table


def _watch(run_dir: Path, show: Callable[[list[dict[str, Any]]], None]) -> bool:
    while True:
        rows = read_run(run_dir).steps
        show(rows)
        lives = is_up(run_dir)  # asked first: what it said last is then there
        state = trainer_state(run_dir)
        if state in ("done", "failed"):
            show(read_run(run_dir).steps)
            return state == "done"
        if not lives:
            raise OmnifleetError(
                Reason.UNAVAILABLE,
                f"the supervisor of {run_dir.name} ended: {last_line(run_dir / 'logs' / 'supervisor.log')}",
                knob="omnifleet train goes on from the newest checkpoint",
            )
        time.sleep(_TICK_S)


def trainer_state(run_dir: Path) -> str:
    """running | waiting | done | failed | gone, as the supervisor sees the trainer."""
    state = read_state(run_dir)
    if state.get("failure"):
        return "failed"
    for process in state.get("processes", ()):
        if process["name"] == "trainer":
            return str(process["state"])
    return "gone"


class _LinePrinter:
    """Where nobody watches live: one line a step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def show(self, rows: list[dict[str, Any]]) -> None:
        for row in rows[self._shown :]:
            cells = (f"{heading} {_cell(row, key, form)}" for heading, key, form in COLUMNS if key in row)
            self._console.print("  ".join(cells), soft_wrap=True)
        self._shown = len(rows)


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else form.format(value)
