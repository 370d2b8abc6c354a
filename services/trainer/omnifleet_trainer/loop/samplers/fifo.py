"""First ready, first trained: no group grows old while younger ones train, and no straggler stalls a step."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet_trainer.ledger import ReadyGroup


def fifo(ready: Sequence[ReadyGroup], needed: int, first_open: tuple[int, int] | None) -> list[ReadyGroup]:
    """The `needed` groups that became ready first."""
    return list(ready[:needed])
