"""The registry on disk: SQLite with WAL, so that a gateway killed at any moment finds its fleet again."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_rollout.fleet.member import Member, Pool
from omnifleet_rollout.fleet.registry import Registry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS members (id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pools (name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


class FleetStore:
    """One file. `save` writes what changed since the last save, in one transaction. Raises DISK_FULL, CORRUPT."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._saved: dict[tuple[str, str], str] = {}
        try:
            self._db = sqlite3.connect(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def load(self, registry: Registry) -> bool:
        """Give a fresh registry what was saved. False if nothing was."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'revision'").fetchone()
        if row is None:
            return False
        members = [_member(json.loads(body)) for (body,) in self._db.execute("SELECT body FROM members")]
        pools = [_pool(json.loads(body)) for (body,) in self._db.execute("SELECT body FROM pools")]
        registry.restore(members, pools, int(row[0]))
        return True

    def save(self, registry: Registry) -> None:
        """Write the changes; on return they survive a killed process."""
        members, pools, revision = registry.dump()
        rows = {("members", m.id): json.dumps(asdict(m)) for m in members}
        rows |= {("pools", p.name): json.dumps(asdict(p)) for p in pools}
        try:
            with self._db:
                for (table, key), body in rows.items():
                    if self._saved.get((table, key)) != body:
                        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (key, body))
                for table, key in self._saved.keys() - rows.keys():
                    column = "id" if table == "members" else "name"
                    self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (key,))
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('revision', ?)", (revision,))
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._saved = rows

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _failed(self, error: sqlite3.Error) -> OmnifleetError:
        full = "full" in str(error)
        reason = Reason.DISK_FULL if full else Reason.CORRUPT
        return OmnifleetError(reason, f"fleet registry {self._path}: {error}", knob="run.root")


def _version(body: dict[str, Any] | None) -> WeightVersion | None:
    return WeightVersion(**body) if body else None


def _state(name: str | None) -> WorkerState | None:
    return WorkerState(name) if name else None


def _member(body: dict[str, Any]) -> Member:
    view = body["view"]
    view["state"], view["version"] = WorkerState(view["state"]), _version(view["version"])
    states = {key: _state(body[key]) for key in ("intent", "end")}
    return Member(**{**body, **states, "view": WorkerView(**view), "report": WorkerState(body["report"])})


def _pool(body: dict[str, Any]) -> Pool:
    return Pool(**{**body, "target": _version(body["target"])})
