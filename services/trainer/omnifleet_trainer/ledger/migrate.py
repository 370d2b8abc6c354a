"""From the schema of an earlier release to today's, in place and in one transaction."""

from __future__ import annotations

import sqlite3

from omnifleet.errors import Reason, invalid

SCHEMA_VERSION = 2

_STEPS: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE groups ADD COLUMN media TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE trajectories ADD COLUMN reward_version TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE trajectories ADD COLUMN spans TEXT NOT NULL DEFAULT ''",
    ),
}
"""Schema version -> statements that lead to the next one."""


def migrate(db: sqlite3.Connection, path: object) -> None:
    """Bring an existing ledger to SCHEMA_VERSION; a new file is left alone. Raises CORRUPT for a schema we do not know."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version not in (0, SCHEMA_VERSION, *_STEPS):
        raise invalid(
            f"ledger {path} has schema {version}, this build writes {SCHEMA_VERSION}", reason=Reason.CORRUPT
        )
    if version == 0:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        while version < SCHEMA_VERSION:
            for statement in _STEPS[version]:
                db.execute(statement)
            version += 1
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
