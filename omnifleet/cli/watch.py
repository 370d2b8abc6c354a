"""The live table of a training run: reads the metrics file, so that it can come and go as it likes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from omnifleet.cli.awaited import awaited
from omnifleet.cli.counted import try_to_keep
from omnifleet.cli.tables import add_columns, open_table
from omnifleet.cli.where import is_up
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.supervisor import last_line, read_state
from omnifleet.report.records import read_mapping, read_run

_TICK_S = 0.25
_ASK_S = 1.0
_COUNT_S = 5.0
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
LEGEND = {
    "held out": "reward on unseen rows",
    "TMPE": "1 = rollout and trainer agree on every logprob",
    "gen KL": "divergence between the two",
    "lag": "steps between the weights that made a token and those it trains",
    "gate ms": "longest time without a token in a refit",
    "in flight": "requests that a refit met",
    "a dot": "not measured in this step",
}


def watch_training(run_dir: Path, recipe: Recipe, console: Console, *, title: str = "") -> bool:
    """Show progress until the trainer is done (True) or has failed for good (False)."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = progress.add_task(title or run_dir.name, total=recipe.trainer.steps)
    if not console.is_terminal:
        return _watch(run_dir, _LinePrinter(console).show, _Lives(run_dir, console).tell)
    now = _Now(lambda: awaited(run_dir, recipe))
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def draw(rows: list[dict[str, Any]]) -> None:
            progress.update(task, completed=rows[-1]["step"] if rows else 0)
            shown = [row for row in rows[:-_ROWS] if "heldout_reward" in row] + rows[-_ROWS:]
            table = [metrics_table(shown, console.width)] if rows else []
            ended = rows and trainer_state(run_dir) in ("done", "failed")
            waits = [] if ended else [Text(f"now: {now.words()}", style="dim")]
            live.update(Group(*table, *waits, progress))

        return _watch(run_dir, draw, _Lives(run_dir, console).tell)


def metrics_table(rows: list[dict[str, Any]], width: int) -> Group:
    """Steps as rows, then what the columns mean. A metric that no step has yet has no column; one that a step does not
    have is a dot.

    width: of the terminal, in characters. Where the columns have no room, headings take two lines; then columns are left
    out, the last one first.
    """
    columns = [column for column in COLUMNS if any(_value(row, column[1]) is not None for row in rows)]
    cells = {heading: [_cell(row, key, form) or "·" for row in rows] for heading, key, form in columns}
    gap = 2 if _room(cells, 2) <= width else 1
    if _room(cells, gap) > width:
        cells = {heading.replace(" ", "\n"): column for heading, column in cells.items()}
    while len(cells) > 1 and _room(cells, gap) > width:
        cells.popitem()
    table = open_table(gap=gap)
    add_columns(table, *cells, right=tuple(cells))
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    shown = {heading.replace("\n", " ") for heading in cells} | {"a dot"}
    legend = " · ".join(f"{heading}: {words}" for heading, words in LEGEND.items() if heading in shown)
    return Group(table, Text(legend, style="dim italic"))


def _room(cells: dict[str, list[str]], gap: int) -> int:
    """Characters that the columns take."""
    widths = (max(map(len, [*heading.split("\n"), *column])) for heading, column in cells.items())
    return sum(widths) + gap * (len(cells) - 1)


class _Now:
    """What the run does now, asked anew once a second."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask, self._words, self._at = ask, "", 0.0

    def words(self) -> str:
        if time.monotonic() - self._at >= _ASK_S:
            self._words, self._at = self._ask(), time.monotonic()
        return self._words


class _Lives:
    """Tells once of each trainer that began while we watch, and did not begin afresh, from where it goes on."""

    def __init__(self, run_dir: Path, console: Console) -> None:
        self._run_dir, self._console = run_dir, console
        self._lineage = self._start().get("lineage")

    def tell(self) -> None:
        start = self._start()
        if start.get("lineage") != self._lineage:
            self._lineage = start.get("lineage")
            if resumed := start.get("resumed"):
                self._console.print(resumed, markup=False, highlight=False, soft_wrap=True)

    def _start(self) -> dict[str, Any]:
        return read_mapping(self._run_dir / "start.json")


def _watch(
    run_dir: Path, show: Callable[[list[dict[str, Any]]], None], tell_of_resumes: Callable[[], None]
) -> bool:
    count_at = 0.0
    while True:
        rows = read_run(run_dir).steps
        tell_of_resumes()
        show(rows)
        if time.monotonic() >= count_at:  # what a process counted is gone with it
            try_to_keep(run_dir, deadline_s=_ASK_S)
            count_at = time.monotonic() + _COUNT_S
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
        console.print("waiting for the first weights and the first held-out score")

    def show(self, rows: list[dict[str, Any]]) -> None:
        for row in rows[self._shown :]:
            cells = ((heading, _cell(row, key, form)) for heading, key, form in COLUMNS)
            self._console.print(
                "  ".join(f"{heading} {cell}" for heading, cell in cells if cell), soft_wrap=True
            )
        self._shown = len(rows)


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = _value(row, key)
    return "" if value is None else form.format(value)


def _value(row: dict[str, Any], key: str) -> float | None:
    """Before the first step nobody writes replies: a refit that met none says nothing then."""
    value: float | None = row.get(key)
    return None if key == "refit_in_flight" and row.get("step") == 0 else value
