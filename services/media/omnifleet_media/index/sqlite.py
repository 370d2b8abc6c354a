"""The embedded index: SQLite in WAL mode, one thread, one step a method; steps that wait share a
transaction. Processes of one host may share it."""

# ruff: noqa: D102 -- the methods are documented in the port

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index import tables
from omnifleet_media.index.port import BlobName, Claim, Entry, Kind, SegmentRecord, Unit
from omnifleet_media.index.together import Outcome, Step, Together

Answer = TypeVar("Answer")

_BUSY_S = 10.0
_CACHE_KIB = 65536
_SEEN = 65536


class SqliteIndex:
    """`omnifleet_media.index.port.Index` in one file. A commit survives a kill; `sync` makes it survive a power cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-index")
        self._thread.submit(self._open).result()
        self._steps = Together(self._thread, self._run)
        self._seen: dict[Digest, None] = {}  # keys that are probably known now: those are looked up first

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=_BUSY_S)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._transact(self._make_schema, "BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error

    def _make_schema(self, db: sqlite3.Connection) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in tables.CHANGES:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"{self._path} is an index of version {version}, this build reads {tables.VERSION}",
                knob="media.store",
            )
        for statement in filter(str.strip, tables.CHANGES[version].split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {tables.VERSION}")

    async def _read(self, step: Callable[[sqlite3.Connection], Answer]) -> Answer:
        return await self._steps.do(step, writes=False)

    async def _write(self, step: Callable[[sqlite3.Connection], Answer]) -> Answer:
        return await self._steps.do(step, writes=True)

    def _transact(self, step: Callable[[sqlite3.Connection], Answer], begin: str) -> Answer:
        try:
            self._db.execute(begin)
            try:
                answer = step(self._db)
                self._db.execute("COMMIT")
                return answer
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error

    def _run(self, steps: Sequence[Step], writes: bool) -> list[Outcome]:
        """All in one transaction, each as if alone. The write lock is taken at once: a transaction that reads first
        could not get it later."""
        try:
            return self._transact(
                lambda db: [self._alone(db, step) for step in steps], "BEGIN IMMEDIATE" if writes else "BEGIN"
            )
        except OmnifleetError as error:
            return [error for _ in steps]

    def _alone(self, db: sqlite3.Connection, step: Step) -> Outcome:
        db.execute("SAVEPOINT step")
        try:
            answer = step(db)
        except (sqlite3.DatabaseError, ValueError, LookupError, TypeError) as error:
            if not db.in_transaction:  # the whole of it was rolled back
                raise
            db.execute("ROLLBACK TO step")
            db.execute("RELEASE step")
            return _index_error(self._path, error) if isinstance(error, sqlite3.DatabaseError) else error
        db.execute("RELEASE step")
        return (answer,)

    # ------------------------------------------------------------------ reads

    async def find_alias(self, alias: Digest) -> Digest | None:
        def step(db: sqlite3.Connection) -> Digest | None:
            row = db.execute("SELECT media FROM aliases WHERE alias = ?", (alias,)).fetchone()
            return Digest(row[0]) if row else None

        return await self._read(step)

    async def find_object(self, alias: Digest) -> MediaObject | None:
        def step(db: sqlite3.Connection) -> MediaObject | None:
            row = db.execute("SELECT media FROM aliases WHERE alias = ?", (alias,)).fetchone()
            return _read_object(db, row[0]) if row else None

        return await self._read(step)

    async def read_object(self, media: Digest) -> MediaObject | None:
        return await self._read(lambda db: _read_object(db, media))

    async def read_frame(self, frame: Digest) -> tuple[int, int] | None:
        def step(db: sqlite3.Connection) -> tuple[int, int] | None:
            row = db.execute(
                "SELECT height, width FROM frames JOIN objects ON digest = media WHERE frame = ? LIMIT 1",
                (frame,),
            ).fetchone()
            return (row[0], row[1]) if row else None

        return await self._read(step)

    async def has_source(self, source: Digest) -> bool:
        return await self._read(
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

        return await self._read(step)

    # ------------------------------------------------------------------ writes

    async def write_source(self, source: Digest, size: int, used_ms: int) -> None:
        await self._write(lambda db: _write_source(db, source, size, used_ms))

    async def write_object(
        self, item: MediaObject, alias: Digest | None, used_ms: int, source: tuple[Digest, int] | None = None
    ) -> None:
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
                "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET used_ms = MAX(used_ms, excluded.used_ms)",
                (*row, used_ms, item.bytes),
            )
            db.executemany("INSERT OR IGNORE INTO frames VALUES (?, ?, ?)", frames)
            if source is not None:
                _write_source(db, *source, used_ms)
            if alias is not None:
                db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?)", (alias, media))
                db.execute("DELETE FROM flights WHERE key = ?", (alias,))

        await self._write(step)

    async def write_segment(self, record: SegmentRecord, used_ms: int) -> None:
        r = record
        row = (r.key, r.media, r.fingerprint, r.token_count, json.dumps(r.grid), r.bytes, r.content, used_ms)

        def step(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            db.execute("DELETE FROM flights WHERE key = ?", (r.key,))

        await self._write(step)

    async def touch(self, used: Mapping[Entry, int]) -> None:
        def step(db: sqlite3.Connection) -> None:
            for entry, used_ms in used.items():
                table, column = tables.TABLES[entry.unit]
                db.execute(
                    f"UPDATE {table} SET used_ms = ?1 WHERE {column} = ?2 AND used_ms < ?1",
                    (used_ms, entry.digest),
                )

        await self._write(step)

    # ------------------------------------------------------------------ leases

    async def take_lease(self, lease: Lease, digests: Sequence[Digest]) -> list[Digest]:
        wanted = list(dict.fromkeys(digests))

        def step(db: sqlite3.Connection) -> list[Digest]:
            missing = [digest for digest in wanted if not _exists(db, digest)]
            if not missing:
                db.execute(
                    "INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?)",
                    (lease.id, lease.owner, lease.run, lease.expires_unix_ms),
                )
                leased = [(digest, lease.id) for digest in wanted]
                db.executemany("INSERT OR IGNORE INTO leased VALUES (?, ?)", leased)
            return missing

        return await self._write(step)

    async def renew_lease(self, lease_id: str, expires_ms: int, now_ms: int) -> Lease | None:
        def step(db: sqlite3.Connection) -> Lease | None:
            row = db.execute(
                "UPDATE leases SET expires_ms = ? WHERE id = ? AND expires_ms > ? RETURNING owner, run",
                (expires_ms, lease_id, now_ms),
            ).fetchone()
            return Lease(lease_id, row[0], row[1], expires_ms) if row else None

        return await self._write(step)

    async def release_lease(self, lease_id: str) -> bool:
        def step(db: sqlite3.Connection) -> bool:
            db.execute("DELETE FROM leased WHERE lease = ?", (lease_id,))
            return db.execute("DELETE FROM leases WHERE id = ?", (lease_id,)).rowcount > 0

        return await self._write(step)

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

        return await self._read(step)

    async def held(self, run: str, now_ms: int) -> dict[Digest, int]:
        def step(db: sqlite3.Connection) -> dict[Digest, int]:
            rows = db.execute(tables.SIZES_HELD, {"run": run, "now": now_ms}).fetchall()
            return {Digest(digest): size for digest, size in rows}

        return await self._read(step)

    async def held_blobs(self, names: Sequence[BlobName], now_ms: int) -> set[BlobName]:
        def step(db: sqlite3.Connection) -> set[BlobName]:
            found = set()
            for name in names:
                query = f"SELECT {tables.HELD.format(tables.OWNERS[name.kind])}"
                if db.execute(query, {"digest": name.digest, "now": now_ms}).fetchone()[0]:
                    found.add(name)
            return found

        return await self._read(step)

    async def count_objects(self) -> int:
        return await self._read(lambda db: int(db.execute("SELECT COUNT(*) FROM objects").fetchone()[0]))

    async def recent(self, limit: int) -> list[Digest]:
        def step(db: sqlite3.Connection) -> list[Digest]:
            query = "SELECT digest FROM objects ORDER BY used_ms DESC LIMIT ?"
            return [Digest(digest) for (digest,) in db.execute(query, (limit,)).fetchall()]

        return await self._read(step)

    # ------------------------------------------------------------------ eviction

    async def idle(self, now_ms: int, limit: int, skip: int = 0) -> list[Entry]:
        def step(db: sqlite3.Connection) -> list[Entry]:
            db.execute(
                "DELETE FROM leased WHERE lease IN (SELECT id FROM leases WHERE expires_ms <= ?)", (now_ms,)
            )
            db.execute("DELETE FROM leases WHERE expires_ms <= ?", (now_ms,))
            bounds = {"now": now_ms, "limit": limit, "skip": skip, "most": limit + skip}
            rows = db.execute(tables.IDLE, bounds).fetchall()
            return [Entry(Unit(unit), Digest(digest)) for unit, digest, _ in rows]

        return await self._write(step)

    async def forget(self, entry: Entry, now_ms: int) -> list[BlobName] | None:
        def step(db: sqlite3.Connection) -> list[BlobName] | None:
            if _held(db, entry, now_ms):
                return None
            frames = _unshared_frames(db, entry.digest) if entry.unit is Unit.OBJECT else []
            table, column = tables.TABLES[entry.unit]
            if db.execute(f"DELETE FROM {table} WHERE {column} = ?", (entry.digest,)).rowcount == 0:
                return None
            if entry.unit is not Unit.OBJECT:
                return [BlobName(Kind(entry.unit), entry.digest)]
            db.execute("DELETE FROM frames WHERE media = ?", (entry.digest,))
            db.execute("DELETE FROM aliases WHERE media = ?", (entry.digest,))
            return [BlobName(Kind.MANIFEST, entry.digest), *(BlobName(Kind.FRAME, frame) for frame in frames)]

        return await self._write(step)

    # ------------------------------------------------------------------ flights and stores

    async def take_flight(
        self, key: Digest, owner: str, expires_ms: int, now_ms: int, *, unless_known: bool = False
    ) -> Claim:
        def is_known(db: sqlite3.Connection) -> bool:
            return bool(db.execute(tables.KNOWN, (key,)).fetchone()[0])

        if unless_known and key in self._seen and await self._read(is_known):
            return Claim.KNOWN  # the write lock is not for those who read

        def claim(db: sqlite3.Connection) -> Claim:
            if unless_known and is_known(db):  # since it was read
                return Claim.KNOWN
            row = db.execute("SELECT owner, expires_ms FROM flights WHERE key = ?", (key,)).fetchone()
            if row is not None and row[0] != owner and row[1] > now_ms:
                return Claim.OTHERS
            db.execute("INSERT OR REPLACE INTO flights VALUES (?, ?, ?)", (key, owner, expires_ms))
            return Claim.KNOWN if is_known(db) else Claim.OURS

        answer = await self._write(claim)
        if answer is not Claim.OTHERS:
            self._see(key)
        return answer

    def _see(self, key: Digest) -> None:
        self._seen[key] = None
        if len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]

    async def end_flight(self, key: Digest, owner: str) -> None:
        query = "DELETE FROM flights WHERE key = ? AND owner = ?"
        await self._write(lambda db: db.execute(query, (key, owner)))

    async def memory(self, store: str) -> str:
        query = "SELECT id FROM stores WHERE id = ?"
        found = await self._read(lambda db: db.execute(query, (store,)).fetchone())
        return str(found[0]) if found else ""

    async def begin_telling(self) -> str:
        """A file that is open loses nothing."""
        return "file"

    async def mark_store(self, store: str, telling: str) -> bool:
        await self._write(lambda db: db.execute("INSERT OR IGNORE INTO stores VALUES (?)", (store,)))
        return True

    # ------------------------------------------------------------------ durability

    async def sync(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sync)

    def _sync(self) -> None:
        try:
            # A full-sync commit flushes the log with every transaction before it.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA user_version = {tables.VERSION}")
            self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise _index_error(self._path, error) from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


def _read_object(db: sqlite3.Connection, media: Digest) -> MediaObject | None:
    row = db.execute(
        "SELECT kind, width, height, timestamps_us, facts FROM objects WHERE digest = ?", (media,)
    ).fetchone()
    if row is None:
        return None
    frames = db.execute("SELECT frame FROM frames WHERE media = ? ORDER BY position", (media,)).fetchall()
    return MediaObject(
        kind=MediaKind(row[0]),
        frames=tuple(Digest(f) for (f,) in frames),
        width=row[1],
        height=row[2],
        timestamps_us=tuple(json.loads(row[3])),
        facts=json.loads(row[4]),
    )


def _write_source(db: sqlite3.Connection, source: Digest, size: int, used_ms: int) -> None:
    db.execute(
        "INSERT INTO sources VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET used_ms = MAX(used_ms, excluded.used_ms), bytes = excluded.bytes",
        (source, used_ms, size),
    )


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
        db.execute(f"SELECT {tables.HELD.format(by)}", {"digest": entry.digest, "now": now_ms}).fetchone()[0]
    )


def _unshared_frames(db: sqlite3.Connection, media: Digest) -> list[Digest]:
    rows = db.execute(
        "SELECT DISTINCT frame FROM frames f WHERE media = ?1"
        " AND NOT EXISTS (SELECT 1 FROM frames other WHERE other.frame = f.frame AND other.media <> ?1)",
        (media,),
    )
    return [Digest(frame) for (frame,) in rows.fetchall()]


def _index_error(path: Path, error: sqlite3.DatabaseError) -> OmnifleetError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_BUSY:
        return retryable(
            Reason.UNAVAILABLE, f"index {path} is busy: another process writes", retry_after_ms=500
        )
    if code == sqlite3.SQLITE_FULL:
        return OmnifleetError(Reason.DISK_FULL, f"the disk of {path} is full", knob="media.store")
    return OmnifleetError(Reason.INTERNAL, f"index {path}: {error}", knob="media.store")
