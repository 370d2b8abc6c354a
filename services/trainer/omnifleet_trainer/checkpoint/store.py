"""Write, find and prune checkpoints of one run. A folder named step_N is complete: it got that name last.

root/step_00000012/{policy/, optimizer/, state.json}; scratch folders begin with `.writing-`. A step that is written
again becomes step_00000012.1, so that no moment is without a complete one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.checkpoint.retention import Retention

FORMAT = 1
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?$")
_SCRATCH = ".writing-"
_STATE = "state.json"
_ours: set[Path] = set()
"""Scratch folders that this process writes now."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything of a run that is not in tensors.

    step: steps that are done. version: number of the last published weights, within `lineage`. ledger_position: what
    the ledger must be at, at least. seeds: name -> state of each random stream. config_digest: of the recipe.
    extra: JSON values of the loop's own; `metric` ranks the checkpoint for retention.
    """

    step: int
    version: int
    lineage: str
    ledger_position: int
    config_digest: str
    seeds: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(
    root: Path, step: int, *, save_policy: Callable[[Path], None], state: CheckpointState
) -> Path:
    """Write `root/step_N` atomically and durably: scratch folder, fsync of every file, rename, fsync of `root`.

    `save_policy` writes into the folder it is given (`Policy.save`). An older checkpoint of the same step is removed
    after. Returns the folder. Raises OmnifleetError(DISK_FULL); what was complete before stays.
    """
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    before = [path for path in _complete(root) if _rank(path)[0] == step]
    with _scratch(root, step) as scratch:
        try:
            save_policy(scratch)
            body = {"format": FORMAT, **asdict(state)}
            (scratch / _STATE).write_text(json.dumps(body, indent=1, sort_keys=True))
            _sync_tree(scratch)
            name = f"step_{step:08d}" + (f".{_rank(before[-1])[1] + 1}" if before else "")
            target = scratch.rename(root / name)
            _sync(root)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OmnifleetError(
                    Reason.DISK_FULL, f"no room for the checkpoint of step {step} in {root}", knob="run.root"
                ) from error
            raise
    for path in before:
        _remove(path)
    return target


@contextmanager
def _scratch(root: Path, step: int) -> Iterator[Path]:
    """A new folder that is removed at the end, unless it was renamed."""
    folder = root / f"{_SCRATCH}{step}-{secrets.token_hex(4)}-{os.getpid()}"
    _ours.add(folder)
    try:
        folder.mkdir()
        yield folder
    finally:
        _ours.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)


def latest_checkpoint(root: Path) -> tuple[Path, CheckpointState] | None:
    """The newest complete checkpoint, or None if the run has none. Half-written ones are removed.

    Raises OmnifleetError(CORRUPT) if a complete one cannot be read: going on from an older one is a decision.
    """
    if not root.is_dir():
        return None
    sweep(root)
    found = _complete(root)
    if not found:
        return None
    newest = found[-1]
    try:
        body = json.loads((newest / _STATE).read_text())
        if body.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        return newest, CheckpointState(**body)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OmnifleetError(
            Reason.CORRUPT,
            f"{newest} cannot be read ({error}); remove it to go on from the one before",
            knob="run.root",
        ) from error


def prune(root: Path, retention: Retention) -> list[Path]:
    """Remove complete checkpoints that `retention` does not keep. Returns what was removed."""
    found = {path: _rank(path)[0] for path in _complete(root)}
    kept = retention.keeps((step, _metric(path)) for path, step in found.items())
    removed = [path for path, step in found.items() if step not in kept]
    for folder in removed:
        _remove(folder)
    return removed


def _metric(folder: Path) -> float | None:
    """The metric that a checkpoint was written with; None if it has none that can be read."""
    try:
        value = json.loads((folder / _STATE).read_text())["extra"].get("metric")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) else None


def oldest_step(root: Path) -> int | None:
    """Step of the oldest complete checkpoint: no resume goes further back. None if there is none."""
    found = _complete(root) if root.is_dir() else []
    return _rank(found[0])[0] if found else None


def sweep(root: Path) -> None:
    """Remove scratch folders that no living process writes."""
    for folder in root.glob(f"{_SCRATCH}*"):
        writer = int(folder.name.rpartition("-")[2])
        alive = folder in _ours if writer == os.getpid() else Path(f"/proc/{writer}").exists()
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """A checkpoint loses its name before its content, so that a crash in between leaves no half one with a name."""
    doomed = folder.rename(
        folder.parent / f"{_SCRATCH}old-{folder.name}-{secrets.token_hex(4)}-{os.getpid()}"
    )
    shutil.rmtree(doomed)


def _rank(folder: Path) -> tuple[int, int]:
    """(step, edition) of a checkpoint folder, (-1, 0) of anything else."""
    match = _NAME.match(folder.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _complete(root: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in root.iterdir() if _rank(path)[0] >= 0), key=_rank)


def _sync_tree(folder: Path) -> None:
    for path in _walk(folder):
        _sync(path)


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path
    yield folder


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
