"""The Trainer service: what the run is doing, and the few things one may ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import omnifleet
from omnifleet.telemetry.counters import Counters
from omnifleet.wire import common_pb2, trainer_pb2, trainer_pb2_grpc
from omnifleet.wire.codec import counters_to_wire, identity_to_wire, spans_to_wire, version_to_wire
from omnifleet.wire.server import INSTANCE, handshake
from omnifleet_trainer.ledger import LedgerReader
from omnifleet_trainer.ledger.queries import LedgerRow
from omnifleet_trainer.loop.controller import Controller
from omnifleet_trainer.loop.journal import Journal, StepRecord

_CHECKPOINT_S = 600.0
_ROWS = 1000  # a row is about 300 bytes; one message holds 16 MiB
_COUNTS = (
    "prompts_leased",
    "attempts",
    "trajectories",
    "consumed",
    "consumed_twice",
    "expired",
    "failed",
    "in_flight",
    "ready",
    "steps",
)


class TrainerServicer(trainer_pb2_grpc.TrainerServicer):
    """Answers for one run. Errors cross the border as OmnifleetError."""

    def __init__(
        self,
        controller: Controller,
        journal: Journal,
        ledger: Path,
        counters: Counters,
        facts: Mapping[str, str],
    ) -> None:
        """ledger: file of the run's ledger. facts: of the policy, shown by Status."""
        self._controller = controller
        self._journal = journal
        self._ledger = ledger
        self._counters = counters
        self._facts = dict(facts)
        self._began = time.monotonic()

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """Contract version and features."""
        return handshake(request, "trainer")

    async def Status(self, request: common_pb2.StatusRequest, context: Any) -> common_pb2.ServiceStatus:
        """State, step, version, queues."""
        c = self._controller
        return common_pb2.ServiceStatus(
            service="trainer",
            version=omnifleet.__version__,
            instance=INSTANCE,
            uptime_s=time.monotonic() - self._began,
            state=c.state,
            counters=counters_to_wire(self._counters.snapshot()),
            facts={"step": str(c.step), "weights": str(c.version), "doing": c.doing, **self._facts},
        )

    async def Pause(self, request: trainer_pb2.PauseRequest, context: Any) -> trainer_pb2.PauseReply:
        """Admit nothing, finish the step in hand."""
        return trainer_pb2.PauseReply(step=self._controller.pause())

    async def Resume(self, request: trainer_pb2.ResumeRequest, context: Any) -> trainer_pb2.ResumeReply:
        """Go on."""
        return trainer_pb2.ResumeReply(step=self._controller.resume())

    async def Checkpoint(
        self, request: trainer_pb2.CheckpointRequest, context: Any
    ) -> trainer_pb2.CheckpointReply:
        """Write a checkpoint once the step in hand is done."""
        path, step = await self._controller.checkpoint(timeout=request.deadline_ms / 1000 or _CHECKPOINT_S)
        return trainer_pb2.CheckpointReply(path=str(path), step=step)

    async def Stop(self, request: trainer_pb2.StopRequest, context: Any) -> trainer_pb2.StopReply:
        """End after the step in hand."""
        return trainer_pb2.StopReply(step=self._controller.stop(checkpoint=request.checkpoint))

    async def Steps(
        self, request: trainer_pb2.StepsRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.StepReport]:
        """Records of the steps after `after_step`; with `follow`, of new ones until the run ends."""
        async with aclosing(self._journal.follow(request.after_step, live=request.follow)) as records:
            async for record in records:
                yield _report(record)

    async def QueryLedger(
        self, request: trainer_pb2.QueryLedgerRequest, context: Any
    ) -> trainer_pb2.QueryLedgerReply:
        """Counts, and up to `limit` rows (0: none, at most 1000)."""
        return await asyncio.to_thread(_query, self._ledger, request)


def _report(record: StepRecord) -> trainer_pb2.StepReport:
    return trainer_pb2.StepReport(
        step=record.step,
        version=version_to_wire(record.version),
        metrics=record.metrics,
        unix_ms=record.unix_ms,
    )


def _query(path: Path, request: trainer_pb2.QueryLedgerRequest) -> trainer_pb2.QueryLedgerReply:
    limit = min(request.limit, _ROWS)
    with LedgerReader(path).one_look() as look:
        counts = look.counts()
        rows = list(look.rows(lineage=request.lineage, state=request.state, limit=limit))
    return trainer_pb2.QueryLedgerReply(
        counts=trainer_pb2.LedgerCounts(**{name: getattr(counts, name) for name in _COUNTS}),
        rows=[_row(row) for row in rows],
    )


def _row(row: LedgerRow) -> trainer_pb2.LedgerRow:
    return trainer_pb2.LedgerRow(
        trajectory=row.trajectory,
        identity=identity_to_wire(row.identity),
        state=row.state,
        reward=row.reward,
        step=row.step,
        outcome=row.outcome,
        spans=spans_to_wire(row.spans),
    )
