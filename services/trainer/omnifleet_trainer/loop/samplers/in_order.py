"""Strictly in the order of the data: repeatable batches, at the price that one straggler holds up the step."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet_trainer.ledger import ReadyGroup


def in_order(
    ready: Sequence[ReadyGroup], needed: int, first_open: tuple[int, int] | None
) -> list[ReadyGroup]:
    """The first groups in the order of training that have no unfinished prompt before them."""
    unobstructed = [group for group in ready if first_open is None or group.order < first_open]
    return sorted(unobstructed, key=lambda group: group.order)[:needed]
