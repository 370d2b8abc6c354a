"""Client of the trainer: watch a run, pause it, have it write a checkpoint, end it, read its account."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from omnifleet.types import Identity, VersionSpan, WeightVersion
from omnifleet.wire import common_pb2, trainer_pb2, trainer_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import counters_from_wire, identity_from_wire, spans_from_wire, version_from_wire
from omnifleet.wire.errors import remote_errors

CALL_S = 10.0
"""Deadline of a call, seconds, where the caller names none."""


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """state: starting | training | paused | stopping | finishing | ended. facts: step, weights, backend, ..."""

    version: str
    instance: str
    uptime_s: float
    state: str
    step: int
    counters: dict[str, float]
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics of one step and the weights that it made. unix_ms: when it ended."""

    step: int
    version: WeightVersion
    metrics: dict[str, float]
    unix_ms: int


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The account of a run; `consumed_twice` must be 0."""

    prompts_leased: int
    attempts: int
    trajectories: int
    consumed: int
    consumed_twice: int
    expired: int
    failed: int
    in_flight: int
    ready: int
    steps: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One trajectory. state: ready | consumed | expired. step: that trained it, 0 = none."""

    trajectory: str
    identity: Identity
    state: str
    reward: float
    step: int
    outcome: str
    spans: list[VersionSpan]


class TrainerClient:
    """`async with TrainerClient.open(address, secret) as client`. Every failed call raises OmnifleetError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = trainer_pb2_grpc.TrainerStub(channel)  # type: ignore[no-untyped-call]

    @staticmethod
    @asynccontextmanager
    async def open(address: str, secret: str = "") -> AsyncIterator[TrainerClient]:
        """Connect to "host:port" with a bearer token; pause, resume, checkpoint and stop need an operator's."""
        async with open_channel(address, secret) as channel:
            yield TrainerClient(channel)

    async def status(self, *, deadline_s: float = CALL_S) -> TrainerStatus:
        """State, step, counters and facts."""
        with remote_errors():
            s = await self._stub.Status(common_pb2.StatusRequest(), timeout=deadline_s)
        facts = dict(s.facts)
        counters = counters_from_wire(s.counters)
        return TrainerStatus(s.version, s.instance, s.uptime_s, s.state, int(facts["step"]), counters, facts)

    async def pause(self, reason: str = "", *, deadline_s: float = CALL_S) -> int:
        """Admit no prompts and train no step after the one in hand. Returns the step."""
        with remote_errors():
            reply = await self._stub.Pause(trainer_pb2.PauseRequest(reason=reason), timeout=deadline_s)
        return int(reply.step)

    async def resume(self, *, deadline_s: float = CALL_S) -> int:
        """Undo `pause`. Returns the step."""
        with remote_errors():
            reply = await self._stub.Resume(trainer_pb2.ResumeRequest(), timeout=deadline_s)
        return int(reply.step)

    async def checkpoint(self, *, deadline_s: float = 600.0) -> tuple[str, int]:
        """Write a checkpoint once the step in hand is done. Returns (folder on the trainer's host, step)."""
        request = trainer_pb2.CheckpointRequest(deadline_ms=int(deadline_s * 1000))
        with remote_errors():
            reply = await self._stub.Checkpoint(request, timeout=deadline_s)
        return reply.path, int(reply.step)

    async def stop(self, *, checkpoint: bool = True, reason: str = "", deadline_s: float = CALL_S) -> int:
        """End the run after the step in hand; the process then exits with 0. Returns the step."""
        request = trainer_pb2.StopRequest(checkpoint=checkpoint, reason=reason)
        with remote_errors():
            reply = await self._stub.Stop(request, timeout=deadline_s)
        return int(reply.step)

    async def steps(self, after: int = 0, *, follow: bool = True) -> AsyncIterator[StepReport]:
        """Reports of the steps after `after`, in order; with `follow`, of new ones until the run ends."""
        request = trainer_pb2.StepsRequest(after_step=after, follow=follow)
        with remote_errors():
            async for m in self._stub.Steps(request):
                yield StepReport(m.step, version_from_wire(m.version), dict(m.metrics), m.unix_ms)

    async def ledger_counts(self, *, deadline_s: float = CALL_S) -> LedgerCounts:
        """The account now, from the ledger itself."""
        with remote_errors():
            reply = await self._stub.QueryLedger(trainer_pb2.QueryLedgerRequest(), timeout=deadline_s)
        return LedgerCounts(**{name: int(getattr(reply.counts, name)) for name in LedgerCounts.__slots__})

    async def ledger_rows(
        self, *, lineage: str = "", state: str = "", limit: int = 100, deadline_s: float = CALL_S
    ) -> list[LedgerRow]:
        """Up to `limit` (at most 1000) trajectories, oldest first."""
        request = trainer_pb2.QueryLedgerRequest(lineage=lineage, state=state, limit=limit)
        with remote_errors():
            reply = await self._stub.QueryLedger(request, timeout=deadline_s)
        return [
            LedgerRow(
                m.trajectory,
                identity_from_wire(m.identity),
                m.state,
                m.reward,
                m.step,
                m.outcome,
                spans_from_wire(m.spans),
            )
            for m in reply.rows
        ]
