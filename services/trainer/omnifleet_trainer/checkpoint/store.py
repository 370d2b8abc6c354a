"""Write, find and prune checkpoints of one run. A folder named step_N is complete: it got that name last.

root/step_00000012/{policy/, optimizer/, state.json}; scratch folders begin with `.writing-`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason

FORMAT = 1
_NAME = re.compile(r"step_(\d+)$")
_SCRATCH = ".writing-"
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything of a run that is not in tensors.

    step: steps that are done. version: number of the last published weights, within `lineage`. ledger_position: what
    the ledger must be at, at least. seeds: name -> state of each random stream. config_digest: of the recipe.
    extra: JSON values of the loop's own.
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

    `save_policy` writes into the folder it is given (`Policy.save`). A complete checkpoint of the same step is
    replaced. Returns the folder. Raises OmnifleetError(DISK_FULL); what was complete before stays.
    """
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    scratch = root / f"{_SCRATCH}{step}-{os.getpid()}"
    try:
        scratch.mkdir()
        save_policy(scratch)
        (scratch / _STATE).write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1, sort_keys=True))
        _sync_tree(scratch)
        target = root / f"step_{step:08d}"
        if target.exists():
            # The old one leaves its name first; a crash between the two renames leaves the one before it newest.
            target.rename(root / f"{_SCRATCH}old-{step}-{os.getpid()}")
        scratch.rename(target)
        _sync(root)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OmnifleetError(
                Reason.DISK_FULL, f"no room for the checkpoint of step {step} in {root}", knob="run.root"
            ) from error
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sweep(root)
    return target


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


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints (at least 1). Returns what was removed."""
    removed = _complete(root)[: -max(keep, 1)]
    for folder in removed:
        # It loses its name before its content, so that a crash in between leaves no half checkpoint with a name.
        doomed = folder.rename(root / f"{_SCRATCH}old-{folder.name}-{os.getpid()}")
        shutil.rmtree(doomed)
    return removed


def sweep(root: Path) -> None:
    """Remove scratch folders that no living process writes."""
    for folder in root.glob(f"{_SCRATCH}*"):
        writer = int(folder.name.rpartition("-")[2])
        if writer == os.getpid() and "old" not in folder.name:
            continue
        if writer == os.getpid() or not Path(f"/proc/{writer}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _complete(root: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return [path for _, path in sorted(found)]


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
