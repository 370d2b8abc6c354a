"""What a run says while it runs: one JSON line a step, kept for readers that come later."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omnifleet.types import WeightVersion
from omnifleet_trainer.loop.pulse import Pulse


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one step and the version that it made. unix_ms: when it ended."""

    step: int
    version: WeightVersion
    metrics: dict[str, float]
    unix_ms: int


class Journal:
    """Appends to `metrics.jsonl` and `samples.jsonl` of a run; records are also kept in memory for `follow`."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        """Read what an earlier life of the run wrote, up to `step`: later lines are of weights that are gone."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = run_dir / "metrics.jsonl"
        self._samples = run_dir / "samples.jsonl"
        for path in (self._metrics, self._samples):
            _end_torn_line(path)
        self._records = {r.step: r for r in _read(self._metrics) if r.step <= step}
        self._changed = Pulse()
        self._closed = False

    @property
    def last(self) -> StepRecord | None:
        """The newest record."""
        return self._records[max(self._records)] if self._records else None

    def write(self, record: StepRecord) -> None:
        """Append a step's record, flushed. Writing a step again replaces it for readers: the last line counts."""
        version = record.version
        line = {
            "step": record.step,
            "lineage": version.lineage,
            "version": version.number,
            "unix_ms": record.unix_ms,
            **record.metrics,
        }
        _append(self._metrics, [line])
        self._records[record.step] = record
        self._changed.fire()

    def amend(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the newest record."""
        if self.last is not None:
            self.write(replace(self.last, metrics={**self.last.metrics, **metrics}))

    def write_samples(self, samples: list[dict[str, Any]]) -> None:
        """Append sample rollouts of an evaluation."""
        _append(self._samples, samples)

    def heldout(self, step: int) -> float | None:
        """Held-out score that was recorded at a step."""
        record = self._records.get(step)
        return record.metrics.get("heldout_reward") if record else None

    def values(self, name: str) -> list[float]:
        """One metric over the steps that have it."""
        return [r.metrics[name] for _, r in sorted(self._records.items()) if name in r.metrics]

    def latest(self, name: str) -> float | None:
        """A metric of the newest record that has it."""
        values = self.values(name)
        return values[-1] if values else None

    async def follow(self, after: int, *, live: bool) -> AsyncGenerator[StepRecord, None]:
        """Records of steps after `after`, in order; with `live`, then new ones until the journal is closed."""
        while True:
            for step in sorted(s for s in self._records if s > after):
                yield self._records[step]
                after = step
            if not live or self._closed:
                return
            await self._changed.until(partial(self._has_news, after))

    def _has_news(self, after: int) -> bool:
        return self._closed or any(step > after for step in self._records)

    def close(self) -> None:
        """End all followers."""
        self._closed = True
        self._changed.fire()


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    with path.open("a", encoding="utf-8") as out:
        out.write(text)


def _end_torn_line(path: Path) -> None:
    """A writer that was cut off leaves a line without an end; what comes next must not become part of it."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def _read(path: Path) -> list[StepRecord]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            body = json.loads(line)
            step, lineage, number = int(body.pop("step")), str(body.pop("lineage")), int(body.pop("version"))
            unix_ms = int(body.pop("unix_ms"))
        except (ValueError, KeyError):
            continue  # the last line of a killed writer may be torn
        records.append(StepRecord(step, WeightVersion("", lineage, number), body, unix_ms))
    return records


def now_ms() -> int:
    """Wall clock, milliseconds."""
    return time.time_ns() // 1_000_000
