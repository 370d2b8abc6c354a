"""Buckets of a snapshot to many workers at once: one broadcast, in a group that is remade when its members change.

A member that fails breaks the round for all: nothing was committed, all serve on. Who failed is left out and the others
are served again, so that one dead or stuck worker costs the others one round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnifleet.client.refit import RefitClient, Seat, Source
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import InFlight
from omnifleet_refit.group import Meeting
from omnifleet_trainer.refit.parts import Part, part_body
from omnifleet_trainer.refit.sending import Errand, Sending
from omnifleet_trainer.refit.share import Others
from omnifleet_trainer.refit.snapshot import Shipment

log = logging.getLogger("omnifleet.trainer.refit")
_ROUNDS = 4
_PAUSE_S = 0.25
_PING_S = 3.0
_BROKEN = (Reason.UNAVAILABLE, Reason.DEADLINE, Reason.CONFLICT)
"""How a member fails for whom only the group broke; also how one fails that is the cause. A ping tells them apart."""
_LEFT = (*_BROKEN, Reason.FENCED)
"""How a member fails that may be in the group no more."""


@dataclass(frozen=True, slots=True)
class Order:
    """What one worker is to stage. ranks: processes of its engine. in_place: see `RefitClient.stage`."""

    client: RefitClient
    shipment: Shipment
    ranks: int = 1
    in_place: InFlight | None = None

    def stage(self, source: Source, deadline_s: float) -> Coroutine[Any, Any, str]:
        """Have it staged from there; the manifest's digest as the worker sees it. Raises what it says."""
        return self.client.stage(
            self.shipment.manifest, source, deadline_s=deadline_s, in_place=self.in_place
        )


Outcome = str | OmnifleetError
"""Of a stage: the manifest's digest as the worker sees it, or why not."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Buckets for a group. ranks: those of each engine that are in it; None: all, of engines that may differ.

    part: what it is a leg of, if it is one; another sender than the first makes the buckets itself.
    """

    buckets: Sequence[torch.Tensor]
    ranks: tuple[int, ...] | None = None
    part: Part | None = None

    @property
    def sender(self) -> int:
        """The trainer's rank that sends it."""
        return 0 if self.part is None else self.part.sender


class Courier:
    """Holds the groups of the last round, since most rounds have the same members. device: of the buckets.

    Legs are sent one after another, each in its own group: a rank that is in several meets them in the same order.
    """

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._meeting = meeting
        self._members: object = None
        self._name = ""
        self._others: Others | None = None
        self._sending = Sending(lambda name, size, seconds: meeting.open_group(name, size, device, seconds))

    @property
    def began(self) -> float:
        """When the first bucket of the last round was sent, monotonic s."""
        return self._sending.began

    @began.setter
    def began(self, moment: float) -> None:
        self._sending.began = moment

    async def stage(
        self, orders: Mapping[str, Order], buckets: Sequence[torch.Tensor], deadline_s: float
    ) -> dict[str, Outcome]:
        """The same buckets to all ranks of all workers; see `stage_legs`."""
        return await self.stage_legs(orders, [Leg(buckets)], deadline_s)

    async def stage_legs(
        self,
        orders: Mapping[str, Order],
        legs: Sequence[Leg],
        deadline_s: float,
        others: Others | None = None,
    ) -> dict[str, Outcome]:
        """Worker id -> outcome. All orders are of these legs: one for all ranks, or the parts of their manifests, in order.

        others: who sends the legs that are not the first sender's. Rounds go on with those who are not to blame.
        """
        self._others = others if any(leg.sender for leg in legs) else None
        outcomes: dict[str, Outcome] = {}
        waiting = dict(orders)
        for attempt in range(_ROUNDS):
            if not waiting:
                return outcomes
            await asyncio.sleep(attempt * _PAUSE_S)  # what was broken off ends first
            results = await self._round(waiting, legs, deadline_s)
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
                    outcomes[id] = await self._alone(id, order, legs, deadline_s)
                return outcomes
        return outcomes

    async def _alone(self, id: str, order: Order, legs: Sequence[Leg], deadline_s: float) -> Outcome:
        """A round with one worker, again for as long as it is still leaving the group that broke."""
        end = time.monotonic() + deadline_s
        while True:
            outcome = (await self._round({id: order}, legs, deadline_s))[id]
            leaving = isinstance(outcome, OmnifleetError) and outcome.reason is Reason.CONFLICT
            if not leaving or time.monotonic() > end:
                return outcome
            await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Leave the groups. Idempotent."""
        self._sending.close()

    async def _round(
        self, orders: Mapping[str, Order], legs: Sequence[Leg], deadline_s: float
    ) -> dict[str, Outcome]:
        """All legs to all, once. The first who fails before all is sent breaks it for everyone."""
        self._seat({id: order.ranks for id, order in orders.items()}, legs)
        whole = legs[0].ranks is None
        sizes = [_size(leg, [order.ranks for order in orders.values()]) for leg in legs]
        names = [self._name if whole else f"{self._name}.{number}" for number in range(len(legs))]
        sending = self._senders(list(zip(names, sizes, legs, strict=True)), deadline_s)
        stages: dict[str, asyncio.Task[str]] = {}
        rank, size = 1, sizes[0] if whole else 1 + len(orders)
        for id, order in orders.items():
            seat = Seat(self._meeting.host, self._meeting.port, self._name, rank, size)
            stages[id] = asyncio.create_task(order.stage(seat, deadline_s))
            rank += order.ranks if whole else 1
        dropped: set[str] = set()
        try:
            await asyncio.wait([*sending, *stages.values()], return_when=asyncio.FIRST_EXCEPTION)
            if not all(task.done() and task.exception() is None for task in sending):
                dropped = await self._break(orders, stages, names)
            results = await asyncio.gather(*stages.values(), return_exceptions=True)
            await asyncio.gather(*sending, return_exceptions=True)
            if any(isinstance(result, OmnifleetError) and result.reason in _LEFT for result in results):
                self.close()  # who failed so has left the group, even if all of it was sent
        except asyncio.CancelledError:
            await asyncio.shield(self._break(orders, stages, names))
            raise
        named = zip(stages, results, strict=True)
        return {id: _outcome(result, dropped=id in dropped) for id, result in named}

    def _seat(self, ranks: Mapping[str, int], legs: Sequence[Leg]) -> None:
        """Keep the groups if their members are these and all are whole, else give up on them."""
        members = (tuple(ranks.items()), tuple((leg.ranks, leg.sender) for leg in legs))
        if members != self._members or not self._sending.whole:
            self.close()
            self._members, self._name = members, self._meeting.new_name()
        self._sending.enter(self._name)

    def _senders(self, plan: Sequence[tuple[str, int, Leg]], deadline_s: float) -> list[asyncio.Task[None]]:
        """All legs, each by its sender. plan: (name of the group, its size, what it is sent)."""
        own = [Errand(name, size, leg.buckets) for name, size, leg in plan if not leg.sender]
        working = [asyncio.to_thread(self._sending.send, self._name, own, deadline_s)]
        if self._others is not None:
            orders = [self._order(plan, rank, deadline_s) for rank in range(1, self._others.count + 1)]
            working.append(asyncio.to_thread(self._others.send, orders, deadline_s))
        return [asyncio.create_task(work) for work in working]

    def _order(
        self, plan: Sequence[tuple[str, int, Leg]], sender: int, deadline_s: float
    ) -> dict[str, Any] | None:
        errands = [
            {"name": name, "size": size, "part": part_body(leg.part)}
            for name, size, leg in plan
            if leg.part is not None and leg.sender == sender
        ]
        meeting = {"host": self._meeting.host, "port": self._meeting.port, "membership": self._name}
        return meeting | {"deadline_s": deadline_s, "errands": errands} if errands else None

    async def _break(
        self, orders: Mapping[str, Order], stages: Mapping[str, asyncio.Task[str]], names: Sequence[str]
    ) -> set[str]:
        """End the waiting of all members: with NCCL one's abort is not felt by the others. Returns who was told so."""
        if self._name:
            for name in names:
                if not self._sending.has(name):
                    self._meeting.call_off(name)
        self.close()
        if self._others is not None:
            await asyncio.to_thread(self._others.stop)
        self._name = ""
        told = {id for id, stage in stages.items() if not stage.done()}
        waiting = [orders[id].client for id in told]
        await asyncio.gather(
            *(client.abort(reason="the group broke", deadline_s=_PING_S) for client in waiting),
            return_exceptions=True,
        )
        return told


def _size(leg: Leg, ranks: Sequence[int]) -> int:
    """Members of a leg's group. ranks: of each engine."""
    return 1 + (sum(ranks) if leg.ranks is None else len(ranks) * len(leg.ranks))


def _outcome(result: str | BaseException, *, dropped: bool) -> Outcome:
    if isinstance(result, str) and dropped:  # it was whole a moment before it was told to drop it
        return retryable(Reason.UNAVAILABLE, "dropped with its round")
    if isinstance(result, str | OmnifleetError):
        return result
    raise result


def no_room(outcome: Outcome) -> bool:
    """True if the worker has no memory for a shadow."""
    return isinstance(outcome, OmnifleetError) and outcome.reason is Reason.NO_ROOM


async def _answers(client: RefitClient) -> bool:
    try:
        await client.describe(deadline_s=_PING_S)
        return True
    except OmnifleetError:
        return False
