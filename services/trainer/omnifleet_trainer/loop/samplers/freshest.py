"""The youngest samples first: least lag, at the price that slow prompts may grow too old and be rolled out again."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet_trainer.ledger import ReadyGroup


def freshest(
    ready: Sequence[ReadyGroup], needed: int, first_open: tuple[int, int] | None
) -> list[ReadyGroup]:
    """The `needed` groups whose oldest token is youngest; among equals, those that became ready first."""
    return sorted(ready, key=lambda group: -group.oldest_version)[:needed]
