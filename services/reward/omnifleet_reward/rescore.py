"""Score again what a run's ledger holds, and say what changed.

Services do not import one another: trajectories come through `omnifleet ledger export`, as JSON lines.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby, islice
from pathlib import Path
from typing import Any

from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_reward.scorer import Reply
from omnifleet_reward.service import RewardService, Scored

_CHUNK = 512
_SAME = 1e-9
_KINDS = (".csv", ".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Change:
    """One trajectory, before and after. new is None if it is unscorable now; error says why."""

    trajectory: str
    group: str
    prompt_id: str
    step: int
    old: float
    new: float | None
    old_version: str
    new_version: str
    mark: str
    error: str
    old_components: dict[str, float]
    new_components: dict[str, float]
    text: str = field(repr=False)

    @property
    def differs(self) -> bool:
        """True if the score is another, or gone."""
        return self.new is None or abs(self.new - self.old) > _SAME


@dataclass(frozen=True, slots=True)
class Summary:
    """reordered: groups in which a sample that was better than another is worse now, so that GRPO would teach otherwise."""

    trajectories: int
    changed: int
    unscorable: int
    reordered: int
    old_mean: float
    new_mean: float


def ledger_rows(
    run_dir: Path, *, state: str = "", step: int = 0, limit: int = -1
) -> Iterator[dict[str, Any]]:
    """Trajectories of a run, first recorded first. Raises UNSUPPORTED if there is no trainer to export them."""
    command = [sys.executable, "-m", "omnifleet", "ledger", "export", "--run", str(run_dir)]
    command += ["--state", state, "--step", str(step), "--limit", str(limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as export:
        assert export.stdout is not None and export.stderr is not None
        try:
            for line in export.stdout:
                yield json.loads(line)
            complaint = export.stderr.read().strip()
        finally:
            export.kill()
    if export.returncode:
        last = complaint.rpartition("\n")[2]
        raise OmnifleetError(Reason.UNSUPPORTED, f"the ledger could not be exported: {last}", knob="--file")


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Trajectories that `omnifleet ledger export` wrote. Raises INVALID_REQUEST."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise invalid(f"{path}, line {number}: {error}", knob="--file") from None
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}", knob="--file") from None


async def rescore(
    service: RewardService, scorers: Sequence[ScorerConfig], rows: Iterable[dict[str, Any]]
) -> AsyncIterator[list[Change]]:
    """Changes of some trajectories at a time, in order."""
    rest = iter(rows)
    while chunk := list(islice(rest, _CHUNK)):
        scored, version = await service.score(scorers, [_reply(row) for row in chunk])
        yield [_change(row, result, version) for row, result in zip(chunk, scored, strict=True)]


def summarise(changes: Sequence[Change]) -> Summary:
    """The report in numbers; means are over what is scorable now."""
    pairs = [(change.old, change.new) for change in changes if change.new is not None]
    count = max(len(pairs), 1)
    by_group = sorted(changes, key=lambda change: change.group)
    groups = [list(members) for _, members in groupby(by_group, key=lambda change: change.group)]
    return Summary(
        trajectories=len(changes),
        changed=sum(change.differs for change in changes),
        unscorable=sum(change.new is None for change in changes),
        reordered=sum(_reordered(members) for members in groups),
        old_mean=sum(old for old, _ in pairs) / count,
        new_mean=sum(new for _, new in pairs) / count,
    )


def write_report(changes: Sequence[Change], path: Path) -> None:
    """All trajectories as .csv (components as JSON text), .jsonl, or .json with the summary. Raises INVALID_REQUEST."""
    check_report(path)
    bodies = [asdict(change) | {"changed": change.differs} for change in changes]
    with path.open("w", encoding="utf-8", newline="") as out:
        if path.suffix == ".json":
            json.dump(
                {"summary": asdict(summarise(changes)), "trajectories": bodies}, out, ensure_ascii=False
            )
        elif path.suffix == ".jsonl":
            out.writelines(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies)
        else:
            _write_csv(bodies, out)


def check_report(path: Path) -> None:
    """Raises INVALID_REQUEST for a report that could not be written, before anything is scored."""
    if path.suffix not in _KINDS or not path.parent.is_dir():
        raise invalid(f"{path}: a report is a {', '.join(_KINDS)} file in a folder that exists", knob="--out")


def _write_csv(bodies: Sequence[dict[str, Any]], out: Any) -> None:
    names = [*Change.__dataclass_fields__, "changed"]
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    for body in bodies:
        parts = {name: json.dumps(body[name]) for name in ("old_components", "new_components")}
        writer.writerow(body | parts)


def kept(rows: Iterable[dict[str, Any]], missing: list[str]) -> Iterator[dict[str, Any]]:
    """Rows that say what was replied and asked; the ids of others (pruned, or of an earlier release) go to `missing`."""
    for row in rows:
        if "text" in row and "ground_truth" in row:
            yield row
        else:
            missing.append(row["trajectory"])


def _reply(row: dict[str, Any]) -> Reply:
    return Reply(
        response=row["text"],
        ground_truth=row["ground_truth"],
        prompt=row.get("prompt", ""),
        media=tuple(digest for _, digest in row.get("media", ())),
        extra=row.get("extra", {}),
        prompt_suffix=row.get("prompt_suffix", ""),
    )


def _change(row: dict[str, Any], scored: Scored, version: str) -> Change:
    return Change(
        trajectory=row["trajectory"],
        group=row["group"],
        prompt_id=row["prompt_id"],
        step=row["step"],
        old=row["reward"],
        new=None if scored.error else scored.total.score,
        old_version=row["reward_version"],
        new_version=version,
        mark=scored.total.mark,
        error=str(scored.error) if scored.error else "",
        old_components=row["components"],
        new_components={label: verdict.score for label, verdict in scored.components},
        text=row["text"],
    )


def _reordered(members: Sequence[Change]) -> bool:
    return any(
        a.new is not None and b.new is not None and (a.old - b.old) * (a.new - b.new) < 0
        for a, b in combinations(members, 2)
    )
