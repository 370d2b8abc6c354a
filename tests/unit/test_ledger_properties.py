"""No prompt is lost or doubled, whatever happens in whatever order, across restarts and rollbacks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnifleet.types import Outcome
from omnifleet_trainer.ledger import PromptLease, SqliteLedger
from tests.unit.ledger_samples import group_of

_EPOCH = [f"p{n}" for n in range(6)]
_LIMIT = 3


class LedgerMachine(RuleBasedStateMachine):
    """A trainer that leases, scores, fails, trains, checkpoints, dies and resumes at random."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.leases: list[PromptLease] = []
        self.epochs = self.lineages = self.step = self.checkpoint = 0
        self.trained: dict[int, list[str]] = {}  # step -> prompt occurrences, what the surviving weights saw
        self.ledger = self._open()

    def _open(self) -> SqliteLedger:
        ledger = SqliteLedger(self.folder / "ledger.sqlite", owner=f"owner-{self.lineages}")
        self.lineages += 1
        ledger.roll_back_to(self.checkpoint, f"lineage-{self.lineages}")
        return ledger

    @rule()
    def next_epoch(self) -> None:
        self.ledger.add_epoch(self.epochs, _EPOCH)
        self.epochs += 1

    @rule(n=st.integers(1, 4))
    def lease(self, n: int) -> None:
        self.leases += self.ledger.lease_next(n, version=self.step, ttl_s=60)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lag=st.integers(0, 2))
    def score(self, data: st.DataObject, lag: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.ledger.record_group(lease, group_of(lease, versions=(max(self.step - lag, 0), self.step)))

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        outcome=st.sampled_from([Outcome.INFRA_ERROR, Outcome.PROMPT_ERROR, Outcome.UNSCORABLE]),
    )
    def fail(self, data: st.DataObject, outcome: Outcome) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        given_up = self.ledger.fail_attempt(lease, outcome, "no luck", limit=_LIMIT)
        assert given_up == (outcome is not Outcome.INFRA_ERROR and lease.failures + 1 == _LIMIT)

    @rule(n=st.integers(1, 3))
    def expire(self, n: int) -> None:
        self.ledger.expire_stale([group.id for group in self.ledger.ready()[:n]])

    @rule(n=st.integers(1, 3))
    def train(self, n: int) -> None:
        groups = self.ledger.ready()[:n]
        if not groups:
            return
        self.step += 1
        self.ledger.consume([group.id for group in groups], step=self.step, version=self.step - 1)
        self.trained[self.step] = [f"{group.epoch}/{group.position}" for group in groups]

    @rule()
    def save(self) -> None:
        self.checkpoint = self.step

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.leases.clear()
        self.step = self.checkpoint
        self.trained = {step: names for step, names in self.trained.items() if step <= self.step}
        self.ledger = self._open()
        assert all(group.newest_version <= self.step for group in self.ledger.ready())

    @invariant()
    def account_is_right(self) -> None:
        counts = self.ledger.counts()
        trained = [name for names in self.trained.values() for name in names]
        assert len(trained) == len(set(trained))
        assert counts.consumed == 2 * len(trained)
        assert (counts.lost, counts.consumed_twice) == (0, 0)
        assert counts.in_flight == len(self.leases)
        seen = counts.pending + counts.in_flight + counts.ready + len(trained) + counts.given_up
        assert seen == self.epochs * len(_EPOCH)

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_no_prompt_is_lost_or_doubled = LedgerMachine.TestCase
