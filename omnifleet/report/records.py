"""What a run left behind for people: step metrics, sample rollouts, the summary. All are JSON files in its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunRecords:
    """steps: one mapping a step. samples: rollouts at evaluations. summary, control: mappings, {} if absent."""

    name: str
    steps: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """(steps, values) of one metric, where it was recorded."""
        points = [(float(s["step"]), float(s[key])) for s in self.steps if s.get(key) is not None]
        return [x for x, _ in points], [y for _, y in points]


def read_run(run_dir: Path) -> RunRecords:
    """Read a run's folder; missing files are empty."""
    return RunRecords(
        run_dir.name,
        _last_of_each_step(read_lines(run_dir / "metrics.jsonl")),
        read_lines(run_dir / "samples.jsonl"),
        read_mapping(run_dir / "summary.json"),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; a torn last line (the writer was killed) is left out."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON object, {} if the file is absent."""
    body = json.loads(path.read_text()) if path.exists() else {}
    return body if isinstance(body, dict) else {}


def _last_of_each_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """After a crash a step is run again: its last record counts."""
    by_step = {int(row["step"]): row for row in rows if "step" in row}
    return [by_step[step] for step in sorted(by_step)]
