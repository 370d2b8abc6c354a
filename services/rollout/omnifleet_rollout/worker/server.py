"""The Rollout and Refit services of a worker: messages in, messages out, nothing decided here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc.aio

import omnifleet
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import VersionBound
from omnifleet.wire import (
    common_pb2,
    refit_pb2,
    refit_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)
from omnifleet.wire.batches import unpacked
from omnifleet.wire.codec import (
    counters_to_wire,
    in_flight_from_wire,
    media_from_wire,
    version_from_wire,
    version_to_wire,
)
from omnifleet.wire.needs import needs_to_wire
from omnifleet.wire.server import INSTANCE, handshake
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.refit.lending import Lending
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.refit.source import source_of
from omnifleet_rollout.worker.gate import Ending, Gate
from omnifleet_rollout.worker.generation import Generation

ROLLOUT_FEATURES = frozenset({"continuation", "exact_version", "score_tokens"})
REFIT_FEATURES = frozenset({"shm", "nccl", "cuda_ipc", "quarantine", "fetch"})
_LONGEST_REPLY_S = 3600.0


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Token prompts in, tokens with provenance out."""

    def __init__(self, engine: Engine, gate: Gate, counters: Counters) -> None:
        self._engine, self._gate, self._counters = engine, gate, counters
        self._generation = Generation(engine, gate, counters)
        self._started = time.monotonic()

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """See the contract."""
        return handshake(request, "rollout", ROLLOUT_FEATURES)

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[rollout_pb2.GenerateEvent, None]:
        """See the contract. A cancelled or late call aborts its samples in the engine."""
        async with _deadline(context.time_remaining()), aclosing(self._generation.run(request)) as events:
            async for event in events:
                yield event

    async def GenerateAtOnce(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> rollout_pb2.GenerateEvent:
        """See the contract."""
        batch = rollout_pb2.EventBatch()
        async with aclosing(self.Generate(request, context)) as messages:
            async for message in messages:
                batch.events.extend(unpacked(message))
        return rollout_pb2.GenerateEvent(batch=batch)

    async def AbortRequests(
        self, request: rollout_pb2.AbortRequestsRequest, context: Any
    ) -> rollout_pb2.AbortRequestsReply:
        """See the contract."""
        wanted = set(request.request_ids)
        ids = self._gate.end(Ending.CANCELLED, lambda flight: flight.request_id in wanted)
        await self._engine.abort(ids)
        return rollout_pb2.AbortRequestsReply(aborted=len(ids))

    async def Render(self, request: rollout_pb2.RenderRequest, context: Any) -> rollout_pb2.RenderReply:
        """Workers hold no chat template."""
        raise OmnifleetError(Reason.UNSUPPORTED, "a worker renders no chat; ask the gateway")

    async def ScoreTokens(
        self, request: rollout_pb2.ScoreTokensRequest, context: Any
    ) -> rollout_pb2.ScoreTokensReply:
        """See the contract."""
        if not request.prompt_token_ids or not request.token_ids:
            raise invalid("prompt_token_ids and token_ids must both have tokens")
        self._gate.reserve(1)
        try:
            media = [media_from_wire(ref) for ref in request.media]
            prompt = await self._engine.prepare(request.prompt_token_ids, media, "")
            async with _deadline(context.time_remaining()):
                await self._gate.until_open(VersionBound())
                self._gate.standing.check_serving()
                version = self._gate.standing.version
                logprobs = await self._engine.score(prompt, request.token_ids)
        finally:
            self._gate.give_back(1)
        if version != self._gate.standing.version or self._gate.standing.fence:
            raise retryable(Reason.VERSION_MOVED, "the weights changed while the tokens were scored")
        return rollout_pb2.ScoreTokensReply(logprobs=logprobs, version=version_to_wire(version))

    async def Status(self, request: common_pb2.StatusRequest, context: Any) -> common_pb2.ServiceStatus:
        """See the contract."""
        standing, facts = self._gate.standing, self._engine.facts
        await self._engine.refresh()
        return common_pb2.ServiceStatus(
            service="rollout",
            version=omnifleet.__version__,
            instance=INSTANCE,
            uptime_s=time.monotonic() - self._started,
            state=str(standing.state),
            counters=counters_to_wire(self._counters.snapshot()),
            facts={
                "worker": standing.worker,
                "engine": facts.info,
                "model": facts.model,
                "weight_version": str(standing.version),
                "logprobs_mode": str(facts.logprobs_mode),
                "fence": standing.fence,
                "note": standing.note,
                "shadow": "yes" if standing.shadow else "no",
            },
        )


class RefitServicer(refit_pb2_grpc.RefitServicer):
    """Weights in; and out, to a peer that has none."""

    def __init__(self, engine: Engine, receiver: Receiver, gate: Gate) -> None:
        self._engine, self._receiver, self._gate = engine, receiver, gate
        self._lending = Lending(engine, receiver)

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """See the contract."""
        return handshake(request, "refit", REFIT_FEATURES)

    async def Describe(self, request: refit_pb2.DescribeRequest, context: Any) -> refit_pb2.DescribeReply:
        """See the contract."""
        facts = self._engine.facts
        return refit_pb2.DescribeReply(
            tensors=facts.tensors,
            transports=facts.transports,
            shadow=facts.shadow and self._gate.standing.shadow,
            version=version_to_wire(self._gate.standing.version),
            engine=facts.info,
            ranks=facts.ranks,
            sparse=facts.sparse,
            needs=self._engine.needs(),
        )

    async def Needs(self, request: refit_pb2.NeedsRequest, context: Any) -> refit_pb2.NeedsReply:
        """See the contract."""
        digest = self._engine.needs()
        return needs_to_wire(digest, await self._engine.read_needs() if digest else [])

    async def Stage(self, request: refit_pb2.StageRequest, context: Any) -> refit_pb2.StageReply:
        """See the contract."""
        source = source_of(request, self._engine.facts.transports)
        began = time.monotonic()
        in_place = in_flight_from_wire(request.in_place) if request.in_place else None
        digest, size = await self._receiver.stage(
            request.manifest, source, request.deadline_ms / 1000, in_place
        )
        return refit_pb2.StageReply(bytes=size, seconds=time.monotonic() - began, manifest_digest=digest)

    async def Commit(self, request: refit_pb2.CommitRequest, context: Any) -> refit_pb2.CommitReply:
        """See the contract."""
        policy = in_flight_from_wire(request.in_flight)
        done = await self._receiver.commit(request.manifest_digest, policy, request.deadline_ms / 1000)
        return refit_pb2.CommitReply(
            version=version_to_wire(done.version),
            gate_seconds=done.gate_seconds,
            in_flight=done.in_flight,
            tensors_loaded=done.tensors_loaded,
        )

    async def Quarantine(
        self, request: refit_pb2.QuarantineRequest, context: Any
    ) -> refit_pb2.QuarantineReply:
        """See the contract."""
        return refit_pb2.QuarantineReply(
            version=version_to_wire(await self._receiver.quarantine(request.reason))
        )

    async def Fetch(
        self, request: refit_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[refit_pb2.FetchReply]:
        """See the contract."""
        async with aclosing(self._lending.lend(version_from_wire(request.version))) as parts:
            async for part in parts:
                yield part

    async def Abort(self, request: refit_pb2.AbortRequest, context: Any) -> refit_pb2.AbortReply:
        """See the contract."""
        return refit_pb2.AbortReply(
            version=version_to_wire(await self._receiver.abort(request.manifest_digest))
        )


@asynccontextmanager
async def _deadline(left_s: float | None) -> AsyncIterator[None]:
    """Bound a call by what its caller left of its time, or by the longest reply there may be. Raises DEADLINE."""
    limit = min(left_s, _LONGEST_REPLY_S) if left_s is not None else _LONGEST_REPLY_S
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        raise retryable(Reason.DEADLINE, f"not finished within {limit:.1f} s") from None
