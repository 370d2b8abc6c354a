"""A worker that is still leaving a broken group is asked again, alone, and not given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.refit.courier import Courier, Leg, Order, Outcome

BUSY = OmnifleetError(Reason.CONFLICT, "another refit step is running", retryable=True)


class Scripted(Courier):
    """Rounds whose outcomes are known beforehand."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__(None, torch.device("cpu"))  # type: ignore[arg-type]
        self.outcomes = list(outcomes)

    async def _round(
        self, orders: Mapping[str, Order], legs: Sequence[Leg], deadline_s: float
    ) -> dict[str, Outcome]:
        return {id: self.outcomes.pop(0) for id in orders}


async def _alone(outcomes: Sequence[Outcome], deadline_s: float = 60.0) -> tuple[Any, int]:
    courier = Scripted(outcomes)
    order = Order(client=None, shipment=None)  # type: ignore[arg-type]
    return await courier._alone("w", order, [], deadline_s), len(courier.outcomes)


async def test_a_worker_that_is_still_leaving_is_asked_again() -> None:
    assert await _alone([BUSY, BUSY, "digest"]) == ("digest", 0)


async def test_any_other_refusal_stands() -> None:
    refused = OmnifleetError(Reason.REFIT_REJECTED, "other bytes")
    assert await _alone([refused, "digest"]) == (refused, 1)


async def test_patience_ends_at_the_deadline() -> None:
    assert await _alone([BUSY] * 9, deadline_s=0.0) == (BUSY, 8)
