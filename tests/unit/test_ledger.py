"""The ledger, operation by operation."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Outcome
from omnifleet_trainer.ledger import LedgerReader, PromptLease, SqliteLedger
from omnifleet_trainer.ledger.codec import pack, unpack
from omnifleet_trainer.ledger.port import CUT_OFF
from tests.unit.ledger_samples import group_of


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    opened = SqliteLedger(tmp_path / "ledger.sqlite", owner="me")
    opened.roll_back_to(0, "a")
    opened.add_epoch(0, ["p0", "p1", "p2"])
    yield opened
    opened.close()


def _lease(ledger: SqliteLedger) -> PromptLease:
    (lease,) = ledger.lease_next(1, version=0, ttl_s=60)
    return lease


def test_prompts_are_leased_once_and_in_order(ledger: SqliteLedger) -> None:
    assert [lease.prompt_id for lease in ledger.lease_next(2, version=0, ttl_s=60)] == ["p0", "p1"]
    assert [lease.prompt_id for lease in ledger.lease_next(2, version=0, ttl_s=60)] == ["p2"]
    assert ledger.lease_next(1, version=0, ttl_s=60) == []
    ledger.add_epoch(0, ["p0", "p1", "p2"])  # repeating an epoch changes nothing
    assert ledger.lease_next(1, version=0, ttl_s=60) == []


def test_a_group_comes_back_token_exact(ledger: SqliteLedger) -> None:
    lease = _lease(ledger)
    group = group_of(lease, versions=(0, 0, 1), samples=3, reward=0.1 + 0.2)
    ledger.record_group(lease, group)
    assert ledger.load_group(lease.attempt) == group
    (ready,) = ledger.ready()
    assert (ready.prompt_id, ready.oldest_version, ready.newest_version, ready.samples) == ("p0", 0, 1, 3)


def test_a_late_answer_of_a_lease_that_was_taken_back_does_not_count(ledger: SqliteLedger) -> None:
    lease = _lease(ledger)
    ledger.fail_attempt(lease, Outcome.INFRA_ERROR, "gone", limit=5)
    with pytest.raises(OmnifleetError) as refusal:
        ledger.record_group(lease, group_of(lease))
    assert refusal.value.reason is Reason.CONFLICT
    assert ledger.counts().trajectories == 0
    assert _lease(ledger).prompt_id == "p0"


def test_leases_run_out(ledger: SqliteLedger) -> None:
    ledger.lease_next(2, version=0, ttl_s=-1)
    assert ledger.reclaim_expired() == 2
    assert ledger.counts().pending == 3


def test_a_group_trains_once(ledger: SqliteLedger) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    ledger.consume([lease.attempt], step=1, version=0)
    with pytest.raises(OmnifleetError) as refusal:
        ledger.consume([lease.attempt], step=2, version=1)
    assert refusal.value.reason is Reason.CONFLICT
    assert (ledger.counts().consumed, ledger.counts().steps) == (2, 1)


def test_consume_is_all_or_nothing(ledger: SqliteLedger) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    with pytest.raises(OmnifleetError):
        ledger.consume([lease.attempt, "nobody"], step=1, version=0)
    assert (ledger.counts().consumed, ledger.counts().ready) == (0, 1)


def test_the_database_itself_refuses_a_second_consumption(ledger: SqliteLedger, tmp_path: Path) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    ledger.consume([lease.attempt], step=1, version=0)
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO consumptions VALUES (?, 'a', 2, 1, NULL)", (f"{lease.attempt}/0",))
    db.close()


def test_faults_of_the_prompt_are_bounded_those_of_machines_are_not(ledger: SqliteLedger) -> None:
    for _ in range(10):
        assert not ledger.fail_attempt(_lease(ledger), Outcome.INFRA_ERROR, "kill -9", limit=2)
    assert not ledger.fail_attempt(_lease(ledger), Outcome.PROMPT_ERROR, "no", limit=2)
    assert ledger.fail_attempt(_lease(ledger), Outcome.UNSCORABLE, "no", limit=2)
    assert _lease(ledger).prompt_id == "p1"
    assert (ledger.counts().given_up, ledger.counts().failed) == (1, 12)


def test_an_attempt_that_a_stop_cut_off_has_not_failed(ledger: SqliteLedger) -> None:
    assert not ledger.fail_attempt(_lease(ledger), Outcome.INFRA_ERROR, CUT_OFF, limit=1)
    assert ledger.counts().failed == 0 and ledger.counts().attempts == 1
    rollback = ledger.roll_back_to(0, "b")
    assert (rollback.cut_off, rollback.reclaimed) == (1, 0), "its prompt is to be taken up again"


def test_a_stale_group_makes_its_prompt_pending_again(ledger: SqliteLedger) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    ledger.expire_stale([lease.attempt])
    again = _lease(ledger)
    assert again.prompt_id == "p0" and again.failures == 0
    ledger.record_group(again, group_of(again))
    assert (ledger.counts().expired, ledger.counts().ready, ledger.counts().lost) == (1, 1, 0)


def test_rollback_returns_what_later_steps_trained_and_drops_what_lost_weights_made(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", owner="first")
    ledger.roll_back_to(0, "a")
    ledger.add_epoch(0, [f"p{n}" for n in range(5)])
    kept, later, lost, ready, _out = ledger.lease_next(5, version=0, ttl_s=60)
    for lease, newest in ((kept, 0), (later, 1), (lost, 2), (ready, 1)):
        ledger.record_group(lease, group_of(lease, versions=(0, newest)))
    for step, lease in enumerate((kept, later, lost), start=1):
        ledger.consume([lease.attempt], step=step, version=step - 1)
    ledger.close()

    ledger = SqliteLedger(tmp_path / "ledger.sqlite", owner="second")
    rollback = ledger.roll_back_to(1, "b")
    assert (rollback.ready_again, rollback.expired, rollback.kept, rollback.reclaimed) == (2, 1, 2, 1)
    assert {group.prompt_id for group in ledger.ready()} == {"p1", "p3"}
    assert [lease.prompt_id for lease in ledger.lease_next(9, version=1, ttl_s=60)] == ["p2", "p4"]
    counts = ledger.counts()
    assert (counts.consumed, counts.voided, counts.consumed_twice, counts.lost) == (2, 4, 0, 0)
    ledger.close()


def test_one_writer_a_run(ledger: SqliteLedger, tmp_path: Path) -> None:
    with pytest.raises(OmnifleetError, match="another trainer writes"):
        SqliteLedger(tmp_path / "ledger.sqlite", owner="other")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(OmnifleetError, match="schema 7"):
        SqliteLedger(tmp_path / "ledger.sqlite", owner="me")
    (tmp_path / "text.sqlite").write_text("this is no database, and long enough to be looked at as one" * 9)
    with pytest.raises(OmnifleetError) as refusal:
        SqliteLedger(tmp_path / "text.sqlite", owner="me")
    assert refusal.value.reason is Reason.CORRUPT


def test_a_backup_is_a_whole_ledger(ledger: SqliteLedger, tmp_path: Path) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    ledger.backup_to(tmp_path / "copy.sqlite")
    ledger.consume([lease.attempt], step=1, version=0)
    assert LedgerReader(tmp_path / "copy.sqlite").counts().ready == 1
    copy = SqliteLedger(tmp_path / "copy.sqlite", owner="me")
    assert copy.load_group(lease.attempt).prompt_id == "p0"
    copy.close()


def test_rows_say_where_each_token_came_from(ledger: SqliteLedger, tmp_path: Path) -> None:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease, versions=(0, 1)))
    ledger.consume([lease.attempt], step=1, version=0)
    reader = LedgerReader(tmp_path / "ledger.sqlite")
    rows = list(reader.rows(state="consumed"))
    assert [(row.prompt_id, row.step, row.reward, row.outcome) for row in rows] == [
        ("p0", 1, 1.0, "scored")
    ] * 2
    assert [span.version.number for span in rows[0].spans] == [0, 1]
    assert {"token_ids", "logprobs", "spans", "media", "components", "prompt_hash"} <= rows[
        0
    ].as_json().keys()
    assert list(reader.rows(state="ready")) == []
    with pytest.raises(OmnifleetError, match="ready, consumed, expired"):
        list(reader.rows(state="eaten"))
    assert reader.outcomes() == {"scored": 1}


def _consume(ledger: SqliteLedger, step: int) -> str:
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease, versions=(step - 1,)))
    ledger.consume([lease.attempt], step=step, version=step - 1)
    return lease.attempt


def test_retention_empties_payloads_and_keeps_the_account(ledger: SqliteLedger, tmp_path: Path) -> None:
    old, young = _consume(ledger, 1), _consume(ledger, 2)
    before = ledger.counts()
    assert ledger.consumed() == before.consumed == 4
    assert ledger.forget_payloads(before_step=2) == 1
    assert ledger.forget_payloads(before_step=2) == 0
    assert ledger.counts() == before
    with pytest.raises(OmnifleetError, match="retention"):
        ledger.load_group(old)
    assert ledger.load_group(young).trajectories
    row = next(row for row in LedgerReader(tmp_path / "ledger.sqlite").rows() if row.group == old)
    assert (row.reward, row.reward_version, row.media_digests) == (1.0, "exact@1", "ab" * 32)
    assert [(s.version.number, s.start, s.end, s.worker) for s in row.spans] == [(0, 0, 1, "worker-0")]
    assert row.identity.prompt_id == "p0" and row.as_json()["reward"] == 1.0


def test_retention_keeps_the_file_from_growing_with_payloads(tmp_path: Path) -> None:
    """A payload of some 3 KB has its page for itself: emptied, the row must leave that page to others."""
    chance = random.Random(0)

    def pages_after(steps: int, keep: int | None) -> int:
        path = tmp_path / f"{steps}-{keep}.sqlite"
        ledger = SqliteLedger(path, owner="me")
        ledger.roll_back_to(0, "a")
        ledger.add_epoch(0, [f"p{i}" for i in range(steps)])
        for step in range(1, steps + 1):
            (lease,) = ledger.lease_next(1, version=step - 1, ttl_s=60)
            group = group_of(lease, samples=4)
            for trajectory in group.trajectories:
                trajectory.token_ids = [chance.randrange(150_000) for _ in range(256)]
                trajectory.logprobs = [-chance.random() for _ in range(256)]
            ledger.record_group(lease, group)
            ledger.consume([lease.attempt], step=step, version=step - 1)
            if keep is not None:
                ledger.forget_payloads(step - keep)
        ledger.close()
        with sqlite3.connect(path) as db:
            return int(db.execute("PRAGMA page_count").fetchone()[0])

    assert pages_after(60, keep=5) < pages_after(60, keep=None) / 3
    rows = list(LedgerReader(tmp_path / "60-5.sqlite").rows())
    assert [row.prompt_id for row in rows] == [f"p{i}" for i in range(60) for _ in range(4)], "in their order"
    assert [row.identity.sample for row in rows] == [0, 1, 2, 3] * 60


def test_a_rollback_past_what_retention_took_asks_the_prompt_again(ledger: SqliteLedger) -> None:
    _consume(ledger, 1)
    ledger.forget_payloads(before_step=2)
    ledger.roll_back_to(0, "b")
    assert ledger.ready() == [] and ledger.counts().lost == 0
    assert _lease(ledger).prompt_id == "p0"


def test_a_ledger_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    SqliteLedger(path, owner="me").close()
    db = sqlite3.connect(path)
    for table, column in (("groups", "media"), ("trajectories", "reward_version"), ("trajectories", "spans")):
        db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    db.execute("DROP TABLE weights")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()
    ledger = SqliteLedger(path, owner="me")
    ledger.roll_back_to(0, "a")
    ledger.add_epoch(0, ["p0"])
    lease = _lease(ledger)
    ledger.record_group(lease, group_of(lease))
    assert ledger.load_group(lease.attempt).prompt_id == "p0"
    ledger.close()


def test_one_select_of_ones_own_and_nothing_else(ledger: SqliteLedger, tmp_path: Path) -> None:
    _consume(ledger, 1)
    reader = LedgerReader(tmp_path / "ledger.sqlite")
    names, rows = reader.select("SELECT reward_version, count(*) AS n FROM trajectories GROUP BY 1")
    assert (names, rows) == (["reward_version", "n"], [("exact@1", 2)])
    for statement in (
        "DELETE FROM trajectories",
        "SELECT nothing FROM nowhere",
        "",
        "PRAGMA user_version = 7",
    ):
        with pytest.raises(OmnifleetError) as refusal:
            reader.select(statement)
        assert refusal.value.reason is Reason.INVALID_REQUEST
    assert ledger.counts().trajectories == 2


def test_payloads_are_exact_and_those_of_earlier_releases_still_read() -> None:
    body = {"text": "é", "reward": 0.1 + 0.2}
    arrays: dict[str, list[float]] = {
        "token_ids": [0, 2**31 - 1],
        "logprobs": [-1e-300, -0.1, 0.0],
        "none": [],
    }
    assert unpack(pack(body, arrays)) == body | arrays
    assert unpack(zstandard.compress(b'{"token_ids":[1,2],"logprobs":[-0.5]}')) == {
        "token_ids": [1, 2],
        "logprobs": [-0.5],
    }
    assert unpack(b"") == {}
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="float"):
            pack({}, {"logprobs": [bad]})
        with pytest.raises(ValueError, match="float"):
            pack({"reward": bad})
