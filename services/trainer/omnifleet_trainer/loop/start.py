"""From where a run starts: afresh, or from the newest checkpoint with the ledger rolled back to it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.checkpoint import latest_checkpoint
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from omnifleet_trainer.ledger.port import Rollback
from omnifleet_trainer.loop.changes import check_unchanged

log = logging.getLogger("omnifleet.trainer")

Mode = Literal["auto", "resume", "fresh"]
LEDGER = "ledger.sqlite"
_PARTS = (
    LEDGER,
    f"{LEDGER}-wal",
    f"{LEDGER}-shm",
    "checkpoints",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "start.json",
    "counters.json",
)


@dataclass(frozen=True, slots=True)
class Start:
    """step: steps in the weights. checkpoint: folder to load them from, None for the recipe's model."""

    step: int
    lineage: str
    checkpoint: Path | None
    ledger: SqliteLedger
    began_unix: float


def find_start(run_dir: Path, mode: Mode, recipe: Recipe | None = None) -> Start:
    """Open the run where it stands.

    `fresh` puts an earlier life of the run aside, `resume` insists on a checkpoint. recipe: compared with the
    checkpoint's. Raises NOT_FOUND, CONFLICT (another trainer has the run), CORRUPT, INVALID_CONFIG.
    """
    if mode == "fresh":
        _put_aside(run_dir)
    found = latest_checkpoint(run_dir / "checkpoints")
    if mode == "resume" and found is None:
        raise OmnifleetError(
            Reason.NOT_FOUND,
            f"{run_dir} has no complete checkpoint to resume from",
            knob="leave out --resume",
        )
    folder, state = found if found else (None, None)
    if recipe is not None and folder is not None and state is not None:
        check_unchanged(recipe, folder, state.config_digest)
    step = state.step if state else 0
    path = run_dir / LEDGER
    if folder is not None and state is not None and not _reaches(path, step, state.ledger_position):
        _restore(folder / LEDGER, path)
    ledger = SqliteLedger(path, owner=uuid.uuid4().hex)
    rollback = ledger.roll_back_to(step, _new_lineage())
    resumed = ""
    if found or rollback.kept or rollback.ready_again or rollback.reclaimed or rollback.cut_off:
        resumed = resumed_in_words(rollback, checkpoint=found is not None)
        log.info("%s", resumed)
    return Start(step, rollback.lineage, folder, ledger, _note(run_dir, rollback.lineage, resumed))


def resumed_in_words(rollback: Rollback, *, checkpoint: bool) -> str:
    """Where a run goes on, and what it still has of its earlier life; what there is none of is not told."""
    counts = (
        (rollback.reclaimed + rollback.cut_off, "prompts that were out taken up again"),
        (rollback.kept, "groups ready to train"),
        (rollback.ready_again, "groups taken back from steps after the checkpoint"),
        (rollback.expired, "groups dropped, whose weights are lost"),
    )
    where = f"resumed from step {rollback.step}" if checkpoint else "begun again at step 0: no checkpoint yet"
    return "; ".join([where, *(f"{count} {words}" for count, words in counts if count)])


def _reaches(path: Path, step: int, consumed: int) -> bool:
    """True if the live ledger has all that the checkpoint was made of."""
    return path.exists() and LedgerReader(path).consumed_up_to(step) >= consumed


def _restore(copy: Path, path: Path) -> None:
    """Go on with the checkpoint's own copy: the live ledger is missing or was set back (a power cut, a lost disk)."""
    log.warning("ledger %s is older than the checkpoint; going on with the checkpoint's copy", path)
    for part in (path, path.with_name(f"{LEDGER}-wal"), path.with_name(f"{LEDGER}-shm")):
        part.unlink(missing_ok=True)
    shutil.copyfile(copy, path)


def _note(run_dir: Path, lineage: str, resumed: str) -> float:
    """Say in start.json how this life of the run began; returns when the first did, Unix seconds."""
    path = run_dir / "start.json"
    try:
        began = float(json.loads(path.read_text())["unix"])
    except FileNotFoundError:
        began = time.time()
    except (ValueError, KeyError) as error:
        raise invalid(f"{path} is damaged: {error}", reason=Reason.CORRUPT) from error
    scratch = path.with_name(f".start.{os.getpid()}.tmp")
    scratch.write_text(json.dumps({"unix": began, "lineage": lineage, "resumed": resumed}))
    scratch.replace(path)
    return began


def _put_aside(run_dir: Path) -> None:
    old = [run_dir / name for name in _PARTS if (run_dir / name).exists()]
    if not old:
        return
    aside = run_dir / f"before-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    log.info("fresh start: the run's earlier life is in %s", aside)


def _new_lineage() -> str:
    return uuid.uuid4().hex[:8]
