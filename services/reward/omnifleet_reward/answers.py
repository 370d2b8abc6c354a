"""What other services answered and what that cost, in one SQLite file: nothing is asked, or paid for, twice."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spent (endpoint TEXT PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL);
"""


class Answers:
    """Bounded: the answers that came first go first. For one thread; every call takes well under a millisecond."""

    def __init__(self, path: Path | None, kept: int) -> None:
        """path: the file, None = memory only. Raises INVALID_CONFIG if it cannot be used."""
        self._kept = kept
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"answers file {path}: {error}", knob="reward_service.answers"
            ) from error

    def find(self, key: str) -> str | None:
        """The answer kept under `key`."""
        row = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, answer: str) -> None:
        """Keep an answer; the oldest goes if there are too many."""
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        self._db.execute(
            "DELETE FROM answers WHERE rowid <= (SELECT max(rowid) FROM answers) - ?", (self._kept,)
        )

    def spent(self, endpoint: str) -> tuple[int, int]:
        """(calls, tokens) so far."""
        row = self._db.execute("SELECT calls, tokens FROM spent WHERE endpoint = ?", (endpoint,)).fetchone()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def spend(self, endpoint: str, *, calls: int = 0, tokens: int = 0) -> None:
        """Add to what was spent."""
        self._db.execute(
            "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (endpoint) DO UPDATE "
            "SET calls = calls + excluded.calls, tokens = tokens + excluded.tokens",
            (endpoint, calls, tokens),
        )

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
