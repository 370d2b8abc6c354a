"""What the loop asks of a ledger, and the words it answers in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omnifleet.types import Group, Outcome


@dataclass(frozen=True, slots=True)
class PromptLease:
    """One attempt at one occurrence of a prompt. `failures`: tries that the prompt itself has spoiled so far."""

    attempt: str
    occurrence: int
    epoch: int
    position: int
    prompt_id: str
    failures: int

    @property
    def order(self) -> tuple[int, int]:
        """Place in the order of training: (epoch, position)."""
        return (self.epoch, self.position)


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A scored group that waits for a step. Versions are the smallest and largest number among its tokens."""

    id: str
    prompt_id: str
    epoch: int
    position: int
    oldest_version: int
    newest_version: int
    samples: int

    @property
    def order(self) -> tuple[int, int]:
        """Place in the order of training: (epoch, position)."""
        return (self.epoch, self.position)


@dataclass(frozen=True, slots=True)
class Rollback:
    """What a new lineage found. Counts of groups: consumed after the checkpoint and ready again, dropped because
    weights that no longer exist made them, kept; leases taken from dead owners; and prompts whose attempt the stop cut off."""

    lineage: str
    step: int
    ready_again: int
    expired: int
    kept: int
    reclaimed: int
    cut_off: int = 0


CUT_OFF = "cancelled"
"""Error of an attempt that a stop of the run cut off. It has not failed."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The account. `consumed_twice` and `lost` must be 0; `voided` are consumptions undone by a rollback. failed: attempts that
    neither trained nor may yet, but for those that a stop of the run cut off."""

    prompts_leased: int
    attempts: int
    trajectories: int
    consumed: int
    consumed_twice: int
    voided: int
    expired: int
    failed: int
    given_up: int
    in_flight: int
    pending: int
    ready: int
    steps: int
    lost: int


class Ledger(Protocol):
    """Every method is one transaction: after a crash it happened wholly or not at all."""

    @property
    def lineage(self) -> str:
        """Id of the current lineage."""
        ...

    def roll_back_to(self, step: int, new_lineage: str) -> Rollback:
        """Start `new_lineage` from the weights after `step` steps. See `Rollback`."""
        ...

    def add_epoch(self, epoch: int, prompt_ids: Sequence[str]) -> None:
        """Append the occurrences of one epoch, in the order of training. Repeating it changes nothing."""
        ...

    def epochs(self) -> int:
        """Epochs added so far."""
        ...

    def lease_next(self, n: int, *, version: int, ttl_s: float) -> list[PromptLease]:
        """Take up to `n` pending occurrences, first in order. `version`: weights that serve now."""
        ...

    def record_group(self, lease: PromptLease, group: Group) -> None:
        """Store all trajectories of an attempt; its prompt is done. `group.id` is the attempt's id.

        Raises CONFLICT if the lease is no longer ours.
        """
        ...

    def fail_attempt(self, lease: PromptLease, outcome: Outcome, error: str, *, limit: int) -> bool:
        """End an attempt without a group. INFRA_ERROR and STALE never count against the prompt; any other outcome does,
        and the `limit`-th gives the prompt up. True if it was given up."""
        ...

    def ready(self) -> list[ReadyGroup]:
        """Groups that wait, in the order in which they became ready."""
        ...

    def load_group(self, group_id: str) -> Group:
        """All trajectories of a group. Raises NOT_FOUND."""
        ...

    def expire_stale(self, group_ids: Sequence[str]) -> None:
        """Drop ready groups that became too old; their prompts are pending again."""
        ...

    def consume(self, group_ids: Sequence[str], *, step: int, version: int) -> None:
        """Account all trajectories of the groups to a step, durably. Raises CONFLICT if one is not ready."""
        ...

    def forget_payloads(self, before_step: int) -> int:
        """Empty payloads of groups consumed by steps below `before_step`, and of expired ones; returns how many."""
        ...

    def first_open(self) -> tuple[int, int] | None:
        """Place (epoch, position) of the first occurrence that is pending or leased, None if there is none."""
        ...

    def consumed(self) -> int:
        """Trajectories that the surviving weights were trained on; quick, however long the run is."""
        ...

    def counts(self) -> LedgerCounts:
        """The account now."""
        ...

    def backup_to(self, path: Path) -> None:
        """A consistent copy, fsynced; may run beside writers. For checkpoints."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...
