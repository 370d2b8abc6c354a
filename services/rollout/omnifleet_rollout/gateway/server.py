"""The Rollout service of the contract, as the gateway speaks it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import common_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.batches import packed
from omnifleet.wire.codec import media_to_wire
from omnifleet.wire.server import handshake
from omnifleet_rollout.fleet.service import FleetServicer
from omnifleet_rollout.gateway.gateway import Gateway


class RolloutServicer(rollout_pb2_grpc.RolloutServicer):
    """Thin: each method hands over to the gateway. The deadline of a call is its caller's."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Handshake(
        self, request: common_pb2.HandshakeRequest, context: Any
    ) -> common_pb2.HandshakeReply:
        """See the contract."""
        return handshake(request, "rollout", frozenset({"chat", "continuation", "version_bounds"}))

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        """See the contract."""
        request.request_id = request.request_id or uuid.uuid4().hex
        async with aclosing(self._gateway.generate(request, context.time_remaining())) as batches:
            async for events in batches:
                for message in packed(events) if request.batched else events:
                    yield message

    async def GenerateAtOnce(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> rollout_pb2.GenerateEvent:
        """Samples of a request end one by one here."""
        raise OmnifleetError(Reason.UNSUPPORTED, "a gateway answers in streams; ask Generate")

    async def AbortRequests(
        self, request: rollout_pb2.AbortRequestsRequest, context: Any
    ) -> rollout_pb2.AbortRequestsReply:
        """See the contract."""
        return rollout_pb2.AbortRequestsReply(aborted=self._gateway.dispatcher.abort(request.request_ids))

    async def Render(self, request: rollout_pb2.RenderRequest, context: Any) -> rollout_pb2.RenderReply:
        """See the contract."""
        rendered = await self._gateway.render(request.chat, request.identity)
        media = [media_to_wire(ref) for ref in rendered.media]
        return rollout_pb2.RenderReply(token_ids=rendered.token_ids, media=media, text=rendered.text)

    async def ScoreTokens(
        self, request: rollout_pb2.ScoreTokensRequest, context: Any
    ) -> rollout_pb2.ScoreTokensReply:
        """See the contract."""
        deadline = self._gateway.deadline(context.time_remaining())
        return await self._gateway.dispatcher.score_tokens(request, deadline)

    async def SetBudget(
        self, request: rollout_pb2.SetBudgetRequest, context: Any
    ) -> rollout_pb2.SetBudgetReply:
        """See the contract."""
        return rollout_pb2.SetBudgetReply(
            unused=self._gateway.dispatcher.budget(request.run, request.samples)
        )

    async def Status(self, request: common_pb2.StatusRequest, context: Any) -> common_pb2.ServiceStatus:
        """See the contract."""
        return self._gateway.status()


def register(gateway: Gateway, server: grpc.aio.Server) -> None:
    """Add the gateway's gRPC services to a server."""
    rollout_pb2_grpc.add_RolloutServicer_to_server(RolloutServicer(gateway), server)  # type: ignore[no-untyped-call]
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(gateway.fleet), server)  # type: ignore[no-untyped-call]
