"""The ledger on SQLite in WAL mode. One writer a run; readers may look on at any time.

Durability: every commit survives kill -9. `consume`, `roll_back_to` and `backup_to` also survive a power cut
(synchronous = FULL); the rest may then lose its last moments, which only means that prompts are rolled out again.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import IO

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import Group, Outcome
from omnifleet_trainer.ledger.codec import (
    light_spans,
    pack_shared,
    pack_trajectory,
    unpack,
    unpack_trajectory,
)
from omnifleet_trainer.ledger.migrate import SCHEMA_VERSION, migrate
from omnifleet_trainer.ledger.port import CUT_OFF, LedgerCounts, PromptLease, ReadyGroup, Rollback
from omnifleet_trainer.ledger.queries import count_all

_BUSY_S = 10.0
_UNCOUNTED = (Outcome.INFRA_ERROR, Outcome.STALE)

_CUT_OFF_PENDING = "SELECT count(*) FROM occurrences WHERE state = 'pending' AND error IS ?"
_EXPIRED_FULL = "SELECT id FROM groups WHERE state = 'expired' AND payload != x''"
_CONSUMED_FULL = """
    SELECT g.id FROM groups g WHERE g.state = 'consumed' AND g.payload != x'' AND EXISTS (
        SELECT 1 FROM trajectories t JOIN consumptions c ON c.trajectory = t.id AND c.voided_by IS NULL
        WHERE t.group_id = g.id AND c.step < ?)
"""
_MOVE_EMPTIED = "UPDATE trajectories SET payload = x'', rowid = ? WHERE id = ?"
"""To the end of the table, where many share a page: emptied in place, each row would keep its page for itself."""


class SqliteLedger:
    """The one writer of a run's ledger, held by a file lock. See `omnifleet_trainer.ledger.port.Ledger`."""

    def __init__(self, path: Path, *, owner: str) -> None:
        """Open or create `path`. `owner` names this process on its leases.

        Raises CONFLICT if another process writes it, CORRUPT if it is not a ledger of this schema, DISK_FULL.
        """
        self._path = path
        self._owner = owner
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_out_others(path)
        try:
            self._db = _open(path)
            row = self._db.execute("SELECT id FROM lineages ORDER BY rowid DESC LIMIT 1").fetchone()
        except BaseException:
            self._lock.close()
            raise
        self._lineage = str(row[0]) if row else ""

    @property
    def lineage(self) -> str:
        """Id of the current lineage; "" before the first `roll_back_to`."""
        return self._lineage

    def roll_back_to(self, step: int, new_lineage: str) -> Rollback:
        """Start `new_lineage` from the weights after `step` steps (0 for a new run)."""
        with self._transaction(durable=True) as db:
            db.execute(
                "INSERT INTO lineages VALUES (?, ?, ?, ?)",
                (new_lineage, self._lineage or None, step, _now_ms()),
            )
            cut_off = db.execute(_CUT_OFF_PENDING, (CUT_OFF,)).fetchone()[0]
            reclaimed = self._reclaim(db, "1")
            ready_again = self._void_after(db, step, new_lineage)
            lost_weights = [
                row[0]
                for row in db.execute(
                    "SELECT id FROM groups WHERE state = 'ready' AND newest_version > ?", (step,)
                )
            ]
            _expire(db, lost_weights)
            kept = db.execute("SELECT count(*) FROM groups WHERE state = 'ready'").fetchone()[0]
        self._lineage = new_lineage
        return Rollback(new_lineage, step, ready_again, len(lost_weights), kept, reclaimed, cut_off)

    def _void_after(self, db: sqlite3.Connection, step: int, new_lineage: str) -> int:
        after = "SELECT trajectory FROM consumptions WHERE voided_by IS NULL AND step > ?"
        again = db.execute(
            f"UPDATE groups SET state = 'ready' WHERE id IN (SELECT group_id FROM trajectories WHERE id IN ({after}))",
            (step,),
        ).rowcount
        db.execute(
            "UPDATE consumptions SET voided_by = ? WHERE voided_by IS NULL AND step > ?", (new_lineage, step)
        )
        emptied = (
            "SELECT id FROM groups WHERE state = 'ready' AND payload = x''"  # older than any kept checkpoint
        )
        _expire(db, [row[0] for row in db.execute(emptied)])
        return again

    def reclaim_expired(self) -> int:
        """Take back leases whose time is over; their prompts are pending. Returns how many."""
        with self._transaction() as db:
            return self._reclaim(db, f"expires_unix_ms < {_now_ms()}")

    def _reclaim(self, db: sqlite3.Connection, where: str) -> int:
        rows = db.execute(f"SELECT occurrence, attempt FROM leases WHERE {where}").fetchall()
        for occurrence, attempt in rows:
            _end(db, attempt, Outcome.INFRA_ERROR, "the lease's owner is gone")
            db.execute("DELETE FROM leases WHERE occurrence = ?", (occurrence,))
            db.execute("UPDATE occurrences SET state = 'pending' WHERE id = ?", (occurrence,))
        return len(rows)

    def add_epoch(self, epoch: int, prompt_ids: Sequence[str]) -> None:
        """Append the occurrences of one epoch, in the order of training."""
        with self._transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO occurrences (epoch, position, prompt_id) VALUES (?, ?, ?)",
                ((epoch, position, prompt_id) for position, prompt_id in enumerate(prompt_ids)),
            )

    def epochs(self) -> int:
        """Epochs added so far."""
        return int(self._db.execute("SELECT coalesce(max(epoch) + 1, 0) FROM occurrences").fetchone()[0])

    def lease_next(self, n: int, *, version: int, ttl_s: float) -> list[PromptLease]:
        """Take up to `n` pending occurrences, first in order, for `ttl_s` seconds."""
        now = _now_ms()
        with self._transaction() as db:
            rows = db.execute(
                "SELECT id, epoch, position, prompt_id, failures FROM occurrences WHERE state = 'pending' "
                "ORDER BY epoch, position LIMIT ?",
                (n,),
            ).fetchall()
            leases = [PromptLease(uuid.uuid4().hex, *row) for row in rows]
            for lease in leases:
                db.execute("UPDATE occurrences SET state = 'leased' WHERE id = ?", (lease.occurrence,))
                db.execute(
                    "INSERT INTO attempts (id, occurrence, lineage, version, started_unix_ms) VALUES (?, ?, ?, ?, ?)",
                    (lease.attempt, lease.occurrence, self._lineage, version, now),
                )
                db.execute(
                    "INSERT INTO leases VALUES (?, ?, ?, ?)",
                    (lease.occurrence, lease.attempt, self._owner, now + int(ttl_s * 1000)),
                )
        return leases

    def record_group(self, lease: PromptLease, group: Group) -> None:
        """Store all trajectories of an attempt; its prompt is done."""
        if group.id != lease.attempt or not group.trajectories:
            raise invalid(
                f"group {group.id!r} of {len(group.trajectories)} samples is not attempt {lease.attempt}'s"
            )
        first = group.trajectories[0]
        newest = max(span.version.number for t in group.trajectories for span in t.spans)
        with self._transaction() as db:
            self._take_back(db, lease)
            _end(db, lease.attempt, Outcome.SCORED, None)
            db.execute(
                "UPDATE occurrences SET state = 'done', outcome = ?, error = NULL WHERE id = ?",
                (Outcome.SCORED, lease.occurrence),
            )
            db.execute(
                "INSERT INTO groups VALUES (?, ?, ?, 'ready', ?, ?, ?, ?, ?)",
                (
                    group.id,
                    lease.occurrence,
                    group.prompt_id,
                    group.oldest_version,
                    newest,
                    len(group.trajectories),
                    pack_shared(first),
                    " ".join(ref.digest for ref in first.media),
                ),
            )
            db.executemany(
                "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        t.id,
                        group.id,
                        t.identity.sample,
                        t.reward,
                        len(t.token_ids),
                        pack_trajectory(t),
                        t.reward_version,
                        light_spans(t.spans),
                    )
                    for t in group.trajectories
                ),
            )
            versions = {span.version for t in group.trajectories for span in t.spans}
            db.executemany(
                "INSERT OR IGNORE INTO weights VALUES (?, ?, ?)",
                ((v.lineage, v.number, v.manifest_digest) for v in versions),
            )

    def fail_attempt(self, lease: PromptLease, outcome: Outcome, error: str, *, limit: int) -> bool:
        """End an attempt without a group; True if the prompt was given up."""
        counted = outcome not in _UNCOUNTED
        given_up = counted and lease.failures + 1 >= limit
        with self._transaction() as db:
            self._take_back(db, lease)
            _end(db, lease.attempt, outcome, error)
            db.execute(
                "UPDATE occurrences SET state = ?, failures = failures + ?, outcome = ?, error = ? WHERE id = ?",
                ("given_up" if given_up else "pending", int(counted), outcome, error, lease.occurrence),
            )
        return given_up

    def _take_back(self, db: sqlite3.Connection, lease: PromptLease) -> None:
        """End the lease. Raises CONFLICT if it was reclaimed meanwhile: a late answer must not count twice."""
        gone = db.execute(
            "DELETE FROM leases WHERE occurrence = ? AND attempt = ?", (lease.occurrence, lease.attempt)
        )
        if gone.rowcount != 1:
            raise OmnifleetError(
                Reason.CONFLICT, f"attempt {lease.attempt} no longer holds prompt {lease.prompt_id!r}"
            )

    def ready(self) -> list[ReadyGroup]:
        """Groups that wait, in the order in which they became ready."""
        rows = self._db.execute(
            "SELECT g.id, g.prompt_id, o.epoch, o.position, oldest_version, newest_version, samples "
            "FROM groups g JOIN occurrences o ON o.id = g.occurrence WHERE g.state = 'ready' ORDER BY g.rowid"
        )
        return [ReadyGroup(*row) for row in rows]

    def load_group(self, group_id: str) -> Group:
        """All trajectories of a group, by sample."""
        head = self._db.execute("SELECT prompt_id, payload FROM groups WHERE id = ?", (group_id,)).fetchone()
        if head is None:
            raise OmnifleetError(Reason.NOT_FOUND, f"the ledger has no group {group_id!r}")
        if not head[1]:
            raise OmnifleetError(
                Reason.NOT_FOUND,
                f"retention took the payload of group {group_id}",
                knob="trainer.ledger_payload_steps",
            )
        shared = unpack(head[1])
        rows = self._db.execute(
            "SELECT id, payload FROM trajectories WHERE group_id = ? ORDER BY sample", (group_id,)
        )
        return Group(
            group_id, head[0], [unpack_trajectory(i, shared, unpack(payload)) for i, payload in rows]
        )

    def expire_stale(self, group_ids: Sequence[str]) -> None:
        """Drop ready groups that became too old; their prompts are pending again."""
        with self._transaction() as db:
            _expire(db, group_ids)

    def consume(self, group_ids: Sequence[str], *, step: int, version: int) -> None:
        """Account all trajectories of the groups to a step, durably."""
        with self._transaction(durable=True) as db:
            for group_id in group_ids:
                taken = db.execute(
                    "UPDATE groups SET state = 'consumed' WHERE id = ? AND state = 'ready'", (group_id,)
                )
                if taken.rowcount != 1:
                    raise OmnifleetError(
                        Reason.CONFLICT, f"group {group_id} is not ready: a step takes a group once"
                    )
                db.execute(
                    "INSERT INTO consumptions SELECT id, ?, ?, ?, NULL FROM trajectories WHERE group_id = ?",
                    (self._lineage, step, version, group_id),
                )

    def forget_payloads(self, before_step: int) -> int:
        """Empty the payloads of groups that no resume can need: consumed by steps below `before_step`, or expired.

        Rows, rewards, versions, spans and digests stay. The file does not shrink; new rows take the freed pages. A pass
        looks at groups with a payload only, however long the run is. Returns how many groups were emptied.
        """
        with self._transaction() as db:
            old = [row[0] for row in db.execute(_EXPIRED_FULL)]
            old += [row[0] for row in db.execute(_CONSUMED_FULL, (before_step,))]
            end = int(db.execute("SELECT coalesce(max(rowid), 0) FROM trajectories").fetchone()[0])
            for group in old:
                rows = db.execute("SELECT id FROM trajectories WHERE group_id = ?", (group,)).fetchall()
                db.executemany(_MOVE_EMPTIED, ((end + i, id) for i, (id,) in enumerate(rows, 1)))
                end += len(rows)
                db.execute("UPDATE groups SET payload = x'' WHERE id = ?", (group,))
            return len(old)

    def first_open(self) -> tuple[int, int] | None:
        """Place (epoch, position) of the first occurrence that is pending or leased, None if there is none."""
        query = "SELECT epoch, position FROM occurrences WHERE state = ? ORDER BY epoch, position LIMIT 1"
        rows = [self._db.execute(query, (state,)).fetchone() for state in ("pending", "leased")]
        return min((tuple(row) for row in rows if row), default=None)

    def consumed(self) -> int:
        """Trajectories that the surviving weights were trained on; quick, however long the run is."""
        query = "SELECT count(*) FROM consumptions WHERE voided_by IS NULL"
        return int(self._db.execute(query).fetchone()[0])

    def counts(self) -> LedgerCounts:
        """The account now."""
        return count_all(self._db)

    def backup_to(self, path: Path) -> None:
        """A consistent copy, fsynced, over a connection of its own: may run in another thread."""
        source = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=_BUSY_S)
        target = sqlite3.connect(path)
        try:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        finally:
            target.close()
            source.close()
        with path.open("rb") as copied:
            os.fsync(copied.fileno())

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._db.close()
        self._lock.close()

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(self._db)
            raise _typed(error, self._path) from error
        except BaseException:
            _roll_back(self._db)
            raise


def _expire(db: sqlite3.Connection, group_ids: Sequence[str]) -> None:
    for group_id in group_ids:
        gone = db.execute("UPDATE groups SET state = 'expired' WHERE id = ? AND state = 'ready'", (group_id,))
        if gone.rowcount != 1:
            raise OmnifleetError(
                Reason.CONFLICT, f"group {group_id} is not ready: only waiting groups expire"
            )
        db.execute(
            "UPDATE occurrences SET state = 'pending', outcome = ? "
            "WHERE id = (SELECT occurrence FROM groups WHERE id = ?)",
            (Outcome.STALE, group_id),
        )
        db.execute("UPDATE attempts SET outcome = ? WHERE id = ?", (Outcome.STALE, group_id))


def _end(db: sqlite3.Connection, attempt: str, outcome: Outcome, error: str | None) -> None:
    db.execute(
        "UPDATE attempts SET outcome = ?, error = ?, ended_unix_ms = ? WHERE id = ?",
        (outcome, error, _now_ms(), attempt),
    )


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA foreign_keys = ON")
        migrate(db, path)
        db.executescript(resources.files(__package__).joinpath("schema.sql").read_text())
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.Error as error:
        db.close()
        raise _typed(error, path) from error
    except BaseException:
        db.close()
        raise
    return db


def _lock_out_others(path: Path) -> IO[bytes]:
    lock = path.with_name(path.name + ".lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise OmnifleetError(
            Reason.CONFLICT, f"another trainer writes {path}; a run has one trainer", knob="run.name"
        ) from error
    return lock


def _roll_back(db: sqlite3.Connection) -> None:
    if db.in_transaction:
        db.execute("ROLLBACK")


def _typed(error: sqlite3.Error, path: Path) -> OmnifleetError:
    if "full" in str(error):
        return OmnifleetError(Reason.DISK_FULL, f"no room for ledger {path}", knob="run.root")
    if isinstance(error, sqlite3.IntegrityError):
        return OmnifleetError(Reason.CONFLICT, f"ledger {path}: {error}")
    return OmnifleetError(Reason.CORRUPT, f"ledger {path}: {error}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
