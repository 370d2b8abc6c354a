"""A trainer's life as far as the ledger sees it, until somebody kills it. Says what it has done after each commit."""

from __future__ import annotations

import random
import sqlite3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnifleet.types import Outcome
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from tests.unit.ledger_samples import group_of


def main(path: Path, life: int) -> None:
    chance = random.Random(life)
    checkpoint = _last_checkpoint(path, chance)
    ledger = SqliteLedger(path, owner=f"life-{life}")
    ledger.roll_back_to(checkpoint, f"life-{life}")
    print("resumed", checkpoint, flush=True)
    step = checkpoint
    while True:
        leases = ledger.lease_next(chance.randint(1, 4), version=step, ttl_s=60)
        if not leases:
            ledger.add_epoch(ledger.epochs(), [f"p{n}" for n in range(10)])
        for lease in leases:
            if chance.random() < 0.2:
                ledger.fail_attempt(lease, Outcome.INFRA_ERROR, "unlucky", limit=3)
            else:
                ledger.record_group(lease, group_of(lease, versions=(step,)))
        ready = [group.id for group in ledger.ready()]
        if len(ready) > 3:
            ledger.expire_stale(ready[3:])
        if len(ready) >= 2:
            step += 1
            ledger.consume(ready[:2], step=step, version=step - 1)
            print("consumed", step, 4, flush=True)
        if chance.random() < 0.1:
            ledger.backup_to(path.with_name("copy.sqlite"))


def _last_checkpoint(path: Path, chance: random.Random) -> int:
    """A checkpoint somewhere near the end of what was trained: not always the newest step had one."""
    if not path.exists():
        return 0
    try:
        steps = LedgerReader(path).counts().steps
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # killed before the schema was there
            return 0
        raise
    return max(0, steps - chance.choice((0, 0, 0, 1, 2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
