"""Sessions on disk: their turns and their workers, in SQLite with WAL, so that a killed gateway finds them again."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, Identity, MediaKind, MediaRef
from omnifleet_rollout.gateway.turns import Memory, Turn, token_array

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    run TEXT, session TEXT, worker TEXT NOT NULL DEFAULT '', environment TEXT NOT NULL DEFAULT '',
    episode TEXT NOT NULL DEFAULT '', used REAL NOT NULL, PRIMARY KEY (run, session));
CREATE INDEX IF NOT EXISTS sessions_used ON sessions (used);
CREATE TABLE IF NOT EXISTS turns (
    run TEXT, session TEXT, key TEXT, parent TEXT, messages TEXT, prompt BLOB, reply BLOB, media TEXT,
    PRIMARY KEY (run, session, key));
"""
_IN_MEMORY = 2048  # sessions whose turns are held ready
_PRUNE_EVERY = 256  # changes between two looks at the limit


class Sessions:
    """One file, or memory only (path None). keep: sessions kept; those unused for longest go first.

    What a call has written survives a killed process. Raises DISK_FULL, CORRUPT.
    """

    def __init__(self, path: Path | None, *, keep: int) -> None:
        self._path, self._keep = path, keep
        self._memories: OrderedDict[tuple[str, str], Memory] = OrderedDict()
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._touched = 0
        try:
            self._db = sqlite3.connect(path if path is not None else ":memory:", isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._prune()

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM sessions")[0][0])

    # ------------------------------------------------------------------ turns

    def memory(self, run: str, session: str) -> Memory:
        """The session's turns; empty for one that nothing is known of."""
        key = (run, session)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(self._load(run, session))
        self._memories.move_to_end(key)
        while len(self._memories) > _IN_MEMORY:
            self._memories.popitem(last=False)
        return memory

    def record(self, who: Identity, turn: Turn) -> None:
        """Keep a turn; on return it survives a killed process. Raises LIMIT_EXCEEDED."""
        self.memory(who.run, who.session).add(turn)
        media = json.dumps([[str(ref.kind), ref.digest] for ref in turn.media])
        blobs = turn.prompt.tobytes(), turn.reply.tobytes()
        self._touch(who)
        self._write(
            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (who.run, who.session, turn.key, turn.parent, " ".join(turn.messages), *blobs, media),
        )

    def _load(self, run: str, session: str) -> dict[str, Turn]:
        query = "SELECT key, parent, messages, prompt, reply, media FROM turns WHERE run = ? AND session = ?"
        rows = self._rows(query, (run, session))
        return {key: _turn(key, *rest) for key, *rest in rows}

    # ------------------------------------------------------------------ workers

    def home(self, run: str, session: str) -> str:
        """The worker that a session sticks to, "" if it has none."""
        key = (run, session)
        if key not in self._homes:
            rows = self._rows("SELECT worker FROM sessions WHERE run = ? AND session = ?", key)
            self._keep_home(key, str(rows[0][0]) if rows else "")
        return self._homes[key]

    def stick(self, run: str, session: str, worker: str) -> None:
        """From now on the session's worker is `worker`."""
        if self.home(run, session) == worker:
            return
        self._touch(Identity(run, session=session))
        query = "UPDATE sessions SET worker = ? WHERE run = ? AND session = ?"
        self._write(query, (worker, run, session))
        self._keep_home((run, session), worker)

    def _keep_home(self, key: tuple[str, str], worker: str) -> None:
        self._homes[key] = worker
        self._homes.move_to_end(key)
        while len(self._homes) > _IN_MEMORY:
            self._homes.popitem(last=False)

    # ------------------------------------------------------------------ the file

    def _touch(self, who: Identity) -> None:
        self._write(
            "INSERT INTO sessions VALUES (?, ?, '', ?, ?, ?) ON CONFLICT DO UPDATE SET used = excluded.used, "
            "environment = iif(excluded.environment = '', environment, excluded.environment), "
            "episode = iif(excluded.episode = '', episode, excluded.episode)",
            (who.run, who.session, who.environment, who.episode, time.time()),
        )
        self._touched += 1
        if self._touched >= _PRUNE_EVERY:
            self._prune()

    def _prune(self) -> None:
        """Forget the sessions beyond `keep` that were unused for longest."""
        self._touched = 0
        old = self._rows(
            "SELECT run, session FROM sessions ORDER BY used DESC LIMIT -1 OFFSET ?", (self._keep,)
        )
        for key in old:
            self._write("DELETE FROM turns WHERE run = ? AND session = ?", key)
            self._write("DELETE FROM sessions WHERE run = ? AND session = ?", key)
            self._memories.pop(key, None)
            self._homes.pop(key, None)

    def _write(self, query: str, values: tuple[object, ...]) -> None:
        try:
            self._db.execute(query, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _rows(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _failed(self, error: sqlite3.Error) -> OmnifleetError:
        reason = Reason.DISK_FULL if "full" in str(error) else Reason.CORRUPT
        return OmnifleetError(reason, f"sessions {self._path}: {error}", knob="run.root")


def _turn(key: str, parent: str, messages: str, prompt: bytes, reply: bytes, media: str) -> Turn:
    ids = [token_array(memoryview(blob).cast("I")) for blob in (prompt, reply)]
    refs = tuple(MediaRef(MediaKind(kind), Digest(digest)) for kind, digest in json.loads(media))
    return Turn(key, parent, tuple(messages.split()), ids[0], ids[1], refs)
