"""Reading a ledger: counts, rows and export. Works beside the writer and on copies in checkpoints."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import Identity, VersionSpan, WeightVersion
from omnifleet_trainer.ledger.codec import unpack, unpack_span
from omnifleet_trainer.ledger.port import CUT_OFF, LedgerCounts

STATES = ("ready", "consumed", "expired")

_COUNTS = {
    "prompts_leased": "SELECT count(DISTINCT occurrence) FROM attempts",
    "attempts": "SELECT count(*) FROM attempts",
    "trajectories": "SELECT count(*) FROM trajectories",
    "consumed": "SELECT count(*) FROM consumptions WHERE voided_by IS NULL",
    # Over occurrences, not ids: two attempts at one prompt that both trained would show here.
    "consumed_twice": """
        SELECT coalesce(sum(times - 1), 0) FROM (
            SELECT count(*) AS times FROM consumptions c
            JOIN trajectories t ON t.id = c.trajectory JOIN groups g ON g.id = t.group_id
            WHERE c.voided_by IS NULL GROUP BY g.occurrence, t.sample HAVING times > 1)""",
    "voided": "SELECT count(*) FROM consumptions WHERE voided_by IS NOT NULL",
    "expired": "SELECT count(*) FROM groups WHERE state = 'expired'",
    # An attempt that a stop of the run cut off has not failed: its prompt is pending again.
    "failed": f"SELECT count(*) FROM attempts WHERE outcome NOT IN ('scored', 'stale') AND error IS NOT '{CUT_OFF}'",
    "given_up": "SELECT count(*) FROM occurrences WHERE state = 'given_up'",
    "in_flight": "SELECT count(*) FROM leases",
    "pending": "SELECT count(*) FROM occurrences WHERE state = 'pending'",
    "ready": "SELECT count(*) FROM groups WHERE state = 'ready'",
    "steps": "SELECT count(DISTINCT step) FROM consumptions WHERE voided_by IS NULL",
    # A prompt whose state has nothing to show for it: leased by nobody, or done without a living group.
    "lost": """
        SELECT count(*) FROM occurrences o WHERE
            (o.state = 'leased') != EXISTS (SELECT 1 FROM leases l WHERE l.occurrence = o.id)
            OR (o.state = 'done') !=
               EXISTS (SELECT 1 FROM groups g WHERE g.occurrence = o.id AND g.state != 'expired')""",
}

_ROWS = """
    SELECT t.id, g.id, g.prompt_id, g.state, t.reward, a.outcome, a.lineage,
           coalesce(c.step, 0) AS step, t.tokens, t.sample, t.reward_version, t.spans, g.media, t.payload, g.payload
    FROM trajectories t JOIN groups g ON g.id = t.group_id JOIN attempts a ON a.id = g.id
    LEFT JOIN consumptions c ON c.trajectory = t.id AND c.voided_by IS NULL
    WHERE (:lineage = '' OR coalesce(c.lineage, a.lineage) = :lineage) AND (:state = '' OR g.state = :state)
      AND (:step = 0 OR c.step = :step)
    ORDER BY g.rowid, t.sample LIMIT :limit
"""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One trajectory as the ledger knows it. step: 0 = not consumed. lineage: of the attempt.

    own, shared: the payloads, {} once retention took them; everything else stays.
    """

    trajectory: str
    group: str
    prompt_id: str
    state: str
    reward: float
    outcome: str
    lineage: str
    step: int
    tokens: int
    sample: int
    reward_version: str
    light_spans: str
    media_digests: str
    own: dict[str, Any]
    shared: dict[str, Any]

    @property
    def identity(self) -> Identity:
        """Whose sample it is."""
        if self.own:
            return Identity(**self.own["identity"])
        return Identity(
            "", prompt_id=self.prompt_id, group_id=self.group, attempt=self.group, sample=self.sample
        )

    @property
    def spans(self) -> list[VersionSpan]:
        """Which weights made which tokens; without manifest digests once retention took the payload."""
        if self.own:
            return [unpack_span(body) for body in self.own["spans"]]
        return [
            VersionSpan(WeightVersion("", lineage, number), start, end, worker)
            for lineage, number, start, end, worker in json.loads(self.light_spans or "[]")
        ]

    def as_json(self) -> dict[str, Any]:
        """The whole row, for export: a line a trajectory."""
        names = (
            "trajectory",
            "group",
            "prompt_id",
            "state",
            "outcome",
            "lineage",
            "step",
            "tokens",
            "reward",
        )
        body = {name: getattr(self, name) for name in names}
        body |= {"reward_version": self.reward_version, "media": self.media_digests.split()}
        return {**body, "spans": json.loads(self.light_spans or "[]"), **self.shared, **self.own}


def count_all(db: sqlite3.Connection) -> LedgerCounts:
    """The account in one consistent look."""
    row = db.execute("SELECT " + ", ".join(f"({query})" for query in _COUNTS.values())).fetchone()
    return LedgerCounts(**dict(zip(_COUNTS, row, strict=True)))


class LedgerReader:
    """Read-only view of a ledger file. Every call opens its own connection: usable from any thread."""

    def __init__(self, path: Path) -> None:
        """`path`: a ledger, live or copied. Raises NOT_FOUND."""
        if not path.is_file():
            raise OmnifleetError(Reason.NOT_FOUND, f"no ledger at {path}", knob="--run, --file")
        self._path = path
        self._held: sqlite3.Connection | None = None

    @contextmanager
    def one_look(self) -> Iterator[LedgerReader]:
        """A reader whose answers are all of one moment, however the writer goes on; for one thread, and not for long."""
        with self._reading() as db:
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM leases").fetchone()  # the moment is that of the first read
            held = LedgerReader(self._path)
            held._held = db
            yield held

    def counts(self) -> LedgerCounts:
        """The account now."""
        with self._reading() as db:
            return count_all(db)

    def rows(
        self, *, lineage: str = "", state: str = "", step: int = 0, limit: int = -1
    ) -> Iterator[LedgerRow]:
        """Trajectories in the order in which they were recorded; step 0 = any, `limit` -1 = all.

        Raises INVALID_REQUEST.
        """
        if state and state not in STATES:
            raise invalid(f"state {state!r} is not one of {', '.join(STATES)}")
        with self._reading() as db:
            wanted = {"lineage": lineage, "state": state, "step": step, "limit": limit}
            for row in db.execute(_ROWS, wanted):
                yield _row(row)

    def select(self, sql: str, *, limit: int = 1000) -> tuple[list[str], list[tuple[Any, ...]]]:
        """One SELECT of the caller's own over the tables of schema.sql: column names and at most `limit` rows.

        The connection is read-only and `query_only`. Raises INVALID_REQUEST for anything that SQLite refuses.
        """
        with self._reading() as db:
            try:
                db.execute("PRAGMA query_only = ON")
                found = db.execute(sql)
                if found.description is None:
                    raise invalid("the statement selects nothing", knob="--sql")
                return [column[0] for column in found.description], found.fetchmany(limit)
            except (sqlite3.Error, sqlite3.Warning) as error:
                raise invalid(f"the ledger cannot answer: {error}", knob="--sql") from error

    def outcomes(self) -> dict[str, int]:
        """Finished attempts by outcome."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT outcome, count(*) FROM attempts WHERE outcome IS NOT NULL GROUP BY outcome"
            )
            return {str(outcome): int(n) for outcome, n in rows}

    def consumed_up_to(self, step: int) -> int:
        """Trajectories that the surviving weights were trained on in steps 1 to `step`."""
        with self._reading() as db:
            query = "SELECT count(*) FROM consumptions WHERE voided_by IS NULL AND step <= ?"
            return int(db.execute(query, (step,)).fetchone()[0])

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if self._held is not None:
            yield self._held
            return
        db = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10.0)
        try:
            yield db
        finally:
            db.close()


def _row(columns: Sequence[Any]) -> LedgerRow:
    values: dict[str, Any] = dict(zip(LedgerRow.__slots__, columns, strict=True))
    values["own"], values["shared"] = unpack(values["own"]), unpack(values["shared"])
    return LedgerRow(**values)
