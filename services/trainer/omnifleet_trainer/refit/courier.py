"""Buckets of a snapshot to many workers at once: one broadcast, in a group that is remade when its members change.

A member that fails breaks the round for all: nothing was committed, all serve on. Who failed is left out and the others
are served again, so that one dead or stuck worker costs the others one round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from omnifleet.client.refit import RefitClient, Seat
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_refit.group import Group, Meeting
from omnifleet_trainer.refit.snapshot import Shipment

log = logging.getLogger("omnifleet.trainer.refit")
_ROUNDS = 4
_PAUSE_S = 0.25
_PING_S = 3.0
_BROKEN = (Reason.UNAVAILABLE, Reason.DEADLINE, Reason.CONFLICT)
"""How a member fails for whom only the group broke; also how one fails that is the cause. A ping tells them apart."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one worker is to stage. ranks: processes of its engine."""

    client: RefitClient
    shipment: Shipment
    ranks: int = 1


Outcome = str | OmnifleetError
"""Of a stage: the manifest's digest as the worker sees it, or why not."""


class Courier:
    """Holds the group of the last round, since most rounds have the same members. device: of the buckets."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._meeting, self._device = meeting, device
        self._members: tuple[tuple[str, int], ...] = ()
        self._name = ""
        self._group: Group | None = None
        self.began = 0.0
        """When the first bucket of the last round was sent, monotonic s."""

    async def stage(
        self, orders: Mapping[str, Order], buckets: Sequence[torch.Tensor], deadline_s: float
    ) -> dict[str, Outcome]:
        """Worker id -> outcome. All orders are of the same buckets. Rounds go on with those who are not to blame."""
        outcomes: dict[str, Outcome] = {}
        waiting = dict(orders)
        for attempt in range(_ROUNDS):
            if not waiting:
                return outcomes
            await asyncio.sleep(attempt * _PAUSE_S)  # what was broken off ends first
            results = await self._round(waiting, buckets, deadline_s)
            outcomes |= results
            broken = [
                id for id, r in results.items() if isinstance(r, OmnifleetError) and r.reason in _BROKEN
            ]
            alive = await asyncio.gather(*(_answers(orders[id].client) for id in broken))
            waiting = {id: orders[id] for id, answers in zip(broken, alive, strict=True) if answers}
            if len(waiting) == len(results) > 1:
                log.warning(
                    "the group of %s breaks and all its members answer: one by one", ", ".join(waiting)
                )
                for id, order in waiting.items():
                    outcomes[id] = await self._alone(id, order, buckets, deadline_s)
                return outcomes
        return outcomes

    async def _alone(
        self, id: str, order: Order, buckets: Sequence[torch.Tensor], deadline_s: float
    ) -> Outcome:
        """A round with one worker, again for as long as it is still leaving the group that broke."""
        end = time.monotonic() + deadline_s
        while True:
            outcome = (await self._round({id: order}, buckets, deadline_s))[id]
            leaving = isinstance(outcome, OmnifleetError) and outcome.reason is Reason.CONFLICT
            if not leaving or time.monotonic() > end:
                return outcome
            await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    async def _round(
        self, orders: Mapping[str, Order], buckets: Sequence[torch.Tensor], deadline_s: float
    ) -> dict[str, Outcome]:
        """One broadcast to all. The first who fails before all is sent breaks it for everyone."""
        self._seat({id: order.ranks for id, order in orders.items()})
        size = 1 + sum(order.ranks for order in orders.values())
        sending = asyncio.create_task(asyncio.to_thread(self._send, buckets, size, deadline_s))
        stages: dict[str, asyncio.Task[str]] = {}
        rank = 1
        for id, order in orders.items():
            seat = Seat(self._meeting.host, self._meeting.port, self._name, rank, size)
            stage = order.client.stage(order.shipment.manifest, seat, deadline_s=deadline_s)
            stages[id] = asyncio.create_task(stage)
            rank += order.ranks
        dropped: set[str] = set()
        try:
            await asyncio.wait([sending, *stages.values()], return_when=asyncio.FIRST_EXCEPTION)
            if not sending.done() or sending.exception() is not None:
                dropped = await self._break(orders, stages)
            results = await asyncio.gather(*stages.values(), return_exceptions=True)
            await asyncio.gather(sending, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.shield(self._break(orders, stages))
            raise
        named = zip(stages, results, strict=True)
        return {id: _outcome(result, dropped=id in dropped) for id, result in named}

    def _seat(self, ranks: Mapping[str, int]) -> None:
        """Keep the group if its members are these and it is whole, else give up on it."""
        members = tuple(ranks.items())
        if members != self._members or self._group is None or self._group.broken:
            self.close()
            self._members, self._name = members, self._meeting.new_name()

    def _send(self, buckets: Sequence[torch.Tensor], size: int, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        name = self._name
        group = self._group
        if group is None:
            group = self._meeting.open_group(name, size, self._device, deadline_s)
            if name != self._name:
                group.abort()
                raise retryable(Reason.UNAVAILABLE, "the round was given up while its group met")
            self._group = group
        group.await_ready(deadline)
        self.began = time.monotonic()
        with group.stream():
            for bucket in buckets:
                group.broadcast(bucket, deadline)
            group.finish(deadline)

    async def _break(self, orders: Mapping[str, Order], stages: Mapping[str, asyncio.Task[str]]) -> set[str]:
        """End the waiting of all members: with NCCL one's abort is not felt by the others. Returns who was told so."""
        if self._group is None and self._name:
            self._meeting.call_off(self._name)
        self.close()
        self._name = ""
        told = {id for id, stage in stages.items() if not stage.done()}
        waiting = [orders[id].client for id in told]
        await asyncio.gather(
            *(client.abort(reason="the group broke", deadline_s=_PING_S) for client in waiting),
            return_exceptions=True,
        )
        return told


def _outcome(result: str | BaseException, *, dropped: bool) -> Outcome:
    if isinstance(result, str) and dropped:  # it was whole a moment before it was told to drop it
        return retryable(Reason.UNAVAILABLE, "dropped with its round")
    if isinstance(result, str | OmnifleetError):
        return result
    raise result


async def _answers(client: RefitClient) -> bool:
    try:
        await client.describe(deadline_s=_PING_S)
        return True
    except OmnifleetError:
        return False
