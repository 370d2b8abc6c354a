"""The embedded index: SQLite in WAL mode, one thread, one transaction a method."""

# ruff: noqa: D102 -- the methods are documented in the port

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import BlobName, Entry, Kind, SegmentRecord, Unit

Answer = TypeVar("Answer")

_VERSION = 1
_SCHEMA = """
CREATE TABLE objects (
    digest TEXT PRIMARY KEY, kind TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
    timestamps_us TEXT NOT NULL, facts TEXT NOT NULL, used_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE frames (
    media TEXT NOT NULL, position INTEGER NOT NULL, frame TEXT NOT NULL, PRIMARY KEY (media, position)
) WITHOUT ROWID;
CREATE INDEX frames_by_digest ON frames (frame);
CREATE TABLE aliases (alias TEXT PRIMARY KEY, media TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX aliases_by_media ON aliases (media);
CREATE TABLE sources (digest TEXT PRIMARY KEY, used_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (
    key TEXT PRIMARY KEY, media TEXT NOT NULL, fingerprint TEXT NOT NULL, token_count INTEGER NOT NULL,
    grid TEXT NOT NULL, bytes INTEGER NOT NULL, content TEXT NOT NULL, used_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE leases (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, run TEXT NOT NULL, expires_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE leased (digest TEXT NOT NULL, lease TEXT NOT NULL, PRIMARY KEY (digest, lease)) WITHOUT ROWID;
CREATE INDEX leased_by_lease ON leased (lease);
CREATE INDEX objects_by_use ON objects (used_ms);
CREATE INDEX sources_by_use ON sources (used_ms);
CREATE INDEX segments_by_use ON segments (used_ms);
"""
_TABLES = {
    Unit.OBJECT: ("objects", "digest"),
    Unit.SOURCE: ("sources", "digest"),
    Unit.SEGMENT: ("segments", "key"),
}
_HELD = "EXISTS (SELECT 1 FROM leased JOIN leases ON id = lease WHERE expires_ms > :now AND leased.digest IN ({}))"
_IDLE = f"""
SELECT * FROM (SELECT 'object', digest, used_ms FROM objects o WHERE NOT {_HELD.format("o.digest")}
               ORDER BY used_ms LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT 'source', digest, used_ms FROM sources s WHERE NOT {_HELD.format("s.digest")}
               ORDER BY used_ms LIMIT :limit)
UNION ALL
SELECT * FROM (SELECT 'segment', key, used_ms FROM segments g WHERE NOT {_HELD.format("g.key, g.media")}
               ORDER BY used_ms LIMIT :limit)
ORDER BY used_ms LIMIT :limit
"""


class SqliteIndex:
    """`omnifleet_media.index.port.Index` in one file. A commit survives a kill; `sync` makes it survive a power cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-index")
        self._thread.submit(self._open).result()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error
        if version not in (0, _VERSION):
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"{self._path} is an index of version {version}, this build reads {_VERSION}",
                knob="media.store",
            )

    async def _do(self, step: Callable[[sqlite3.Connection], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, step)

    def _transact(self, step: Callable[[sqlite3.Connection], Answer]) -> Answer:
        try:
            self._db.execute("BEGIN")
            try:
                answer = step(self._db)
                self._db.execute("COMMIT")
                return answer
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error

    # ------------------------------------------------------------------ reads

    async def find_alias(self, alias: Digest) -> Digest | None:
        def step(db: sqlite3.Connection) -> Digest | None:
            row = db.execute("SELECT media FROM aliases WHERE alias = ?", (alias,)).fetchone()
            return Digest(row[0]) if row else None

        return await self._do(step)

    async def read_object(self, media: Digest) -> MediaObject | None:
        def step(db: sqlite3.Connection) -> MediaObject | None:
            row = db.execute(
                "SELECT kind, width, height, timestamps_us, facts FROM objects WHERE digest = ?", (media,)
            ).fetchone()
            if row is None:
                return None
            frames = db.execute(
                "SELECT frame FROM frames WHERE media = ? ORDER BY position", (media,)
            ).fetchall()
            return MediaObject(
                kind=MediaKind(row[0]),
                frames=tuple(Digest(f) for (f,) in frames),
                width=row[1],
                height=row[2],
                timestamps_us=tuple(json.loads(row[3])),
                facts=json.loads(row[4]),
            )

        return await self._do(step)

    async def read_frame(self, frame: Digest) -> tuple[int, int] | None:
        def step(db: sqlite3.Connection) -> tuple[int, int] | None:
            row = db.execute(
                "SELECT height, width FROM frames JOIN objects ON digest = media WHERE frame = ? LIMIT 1",
                (frame,),
            ).fetchone()
            return (row[0], row[1]) if row else None

        return await self._do(step)

    async def has_source(self, source: Digest) -> bool:
        return await self._do(
            lambda db: db.execute("SELECT 1 FROM sources WHERE digest = ?", (source,)).fetchone() is not None
        )

    async def read_segment(self, key: Digest) -> SegmentRecord | None:
        def step(db: sqlite3.Connection) -> SegmentRecord | None:
            row = db.execute(
                "SELECT media, fingerprint, token_count, grid, bytes, content FROM segments WHERE key = ?",
                (key,),
            ).fetchone()
            if row is None:
                return None
            media, fingerprint, token_count, grid, size, content = row
            return SegmentRecord(key, media, fingerprint, token_count, tuple(json.loads(grid)), size, content)

        return await self._do(step)

    # ------------------------------------------------------------------ writes

    async def write_source(self, source: Digest, used_ms: int) -> None:
        await self._do(
            lambda db: db.execute(
                "INSERT INTO sources VALUES (?, ?) ON CONFLICT DO UPDATE SET used_ms = excluded.used_ms",
                (source, used_ms),
            )
        )

    async def write_object(self, item: MediaObject, alias: Digest, used_ms: int) -> None:
        media = item.digest
        row = (
            media,
            str(item.kind),
            item.width,
            item.height,
            json.dumps(item.timestamps_us),
            json.dumps(dict(item.facts)),
        )
        frames = [(media, position, frame) for position, frame in enumerate(item.frames)]

        def step(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET used_ms = excluded.used_ms",
                (*row, used_ms),
            )
            db.executemany("INSERT OR IGNORE INTO frames VALUES (?, ?, ?)", frames)
            db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?)", (alias, media))

        await self._do(step)

    async def write_segment(self, record: SegmentRecord, used_ms: int) -> None:
        r = record
        row = (r.key, r.media, r.fingerprint, r.token_count, json.dumps(r.grid), r.bytes, r.content, used_ms)
        await self._do(
            lambda db: db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        )

    async def touch(self, used: Mapping[Entry, int]) -> None:
        def step(db: sqlite3.Connection) -> None:
            for entry, used_ms in used.items():
                table, column = _TABLES[entry.unit]
                db.execute(
                    f"UPDATE {table} SET used_ms = ?1 WHERE {column} = ?2 AND used_ms < ?1",
                    (used_ms, entry.digest),
                )

        await self._do(step)

    # ------------------------------------------------------------------ leases

    async def take_lease(self, lease: Lease, digests: Sequence[Digest]) -> list[Digest]:
        wanted = list(dict.fromkeys(digests))

        def step(db: sqlite3.Connection) -> list[Digest]:
            missing = [digest for digest in wanted if not _exists(db, digest)]
            if not missing:
                db.execute(
                    "INSERT INTO leases VALUES (?, ?, ?, ?)",
                    (lease.id, lease.owner, lease.run, lease.expires_unix_ms),
                )
                db.executemany("INSERT INTO leased VALUES (?, ?)", [(digest, lease.id) for digest in wanted])
            return missing

        return await self._do(step)

    async def renew_lease(self, lease_id: str, expires_ms: int, now_ms: int) -> Lease | None:
        def step(db: sqlite3.Connection) -> Lease | None:
            row = db.execute(
                "UPDATE leases SET expires_ms = ? WHERE id = ? AND expires_ms > ? RETURNING owner, run",
                (expires_ms, lease_id, now_ms),
            ).fetchone()
            return Lease(lease_id, row[0], row[1], expires_ms) if row else None

        return await self._do(step)

    async def release_lease(self, lease_id: str) -> bool:
        def step(db: sqlite3.Connection) -> bool:
            db.execute("DELETE FROM leased WHERE lease = ?", (lease_id,))
            return db.execute("DELETE FROM leases WHERE id = ?", (lease_id,)).rowcount > 0

        return await self._do(step)

    async def count_leases(self, digest: Digest | None, now_ms: int) -> int:
        def step(db: sqlite3.Connection) -> int:
            if digest is None:
                query = "SELECT COUNT(*) FROM leases WHERE expires_ms > :now"
            else:
                query = (
                    "SELECT COUNT(*) FROM leased JOIN leases ON id = lease"
                    " WHERE digest = :digest AND expires_ms > :now"
                )
            return int(db.execute(query, {"digest": digest, "now": now_ms}).fetchone()[0])

        return await self._do(step)

    async def count_objects(self) -> int:
        return await self._do(lambda db: int(db.execute("SELECT COUNT(*) FROM objects").fetchone()[0]))

    # ------------------------------------------------------------------ eviction

    async def idle(self, now_ms: int, limit: int) -> list[Entry]:
        def step(db: sqlite3.Connection) -> list[Entry]:
            db.execute(
                "DELETE FROM leased WHERE lease IN (SELECT id FROM leases WHERE expires_ms <= ?)", (now_ms,)
            )
            db.execute("DELETE FROM leases WHERE expires_ms <= ?", (now_ms,))
            rows = db.execute(_IDLE, {"now": now_ms, "limit": limit}).fetchall()
            return [Entry(Unit(unit), Digest(digest)) for unit, digest, _ in rows]

        return await self._do(step)

    async def forget(self, entry: Entry, now_ms: int) -> list[BlobName] | None:
        def step(db: sqlite3.Connection) -> list[BlobName] | None:
            if _held(db, entry, now_ms):
                return None
            frames = _unshared_frames(db, entry.digest) if entry.unit is Unit.OBJECT else []
            table, column = _TABLES[entry.unit]
            if db.execute(f"DELETE FROM {table} WHERE {column} = ?", (entry.digest,)).rowcount == 0:
                return None
            if entry.unit is not Unit.OBJECT:
                return [BlobName(Kind(entry.unit), entry.digest)]
            db.execute("DELETE FROM frames WHERE media = ?", (entry.digest,))
            db.execute("DELETE FROM aliases WHERE media = ?", (entry.digest,))
            return [BlobName(Kind.MANIFEST, entry.digest), *(BlobName(Kind.FRAME, frame) for frame in frames)]

        return await self._do(step)

    # ------------------------------------------------------------------ durability

    async def sync(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sync)

    def _sync(self) -> None:
        try:
            # A full-sync commit flushes the log with every transaction before it.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
            self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


def _exists(db: sqlite3.Connection, digest: Digest) -> bool:
    query = (
        "SELECT EXISTS (SELECT 1 FROM objects WHERE digest = ?1) OR EXISTS (SELECT 1 FROM segments WHERE key = ?1)"
        " OR EXISTS (SELECT 1 FROM sources WHERE digest = ?1)"
    )
    return bool(db.execute(query, (digest,)).fetchone()[0])


def _held(db: sqlite3.Connection, entry: Entry, now_ms: int) -> bool:
    by = ":digest"
    if entry.unit is Unit.SEGMENT:
        by = ":digest, (SELECT media FROM segments WHERE key = :digest)"
    return bool(
        db.execute(f"SELECT {_HELD.format(by)}", {"digest": entry.digest, "now": now_ms}).fetchone()[0]
    )


def _unshared_frames(db: sqlite3.Connection, media: Digest) -> list[Digest]:
    rows = db.execute(
        "SELECT DISTINCT frame FROM frames f WHERE media = ?1"
        " AND NOT EXISTS (SELECT 1 FROM frames other WHERE other.frame = f.frame AND other.media <> ?1)",
        (media,),
    )
    return [Digest(frame) for (frame,) in rows.fetchall()]


def _index_error(path: Path, error: sqlite3.DatabaseError) -> OmnifleetError:
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return OmnifleetError(Reason.DISK_FULL, f"the disk of {path} is full", knob="media.store")
    return OmnifleetError(Reason.INTERNAL, f"index {path}: {error}", knob="media.store")
