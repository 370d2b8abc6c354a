"""Client of the rollout service: exact tokens in and out. Works against the gateway and against one worker."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from omnifleet.client.rollout_events import (
    Done,
    Event,
    Failed,
    PromptSeen,
    Tokens,
    event_from_wire,
    gathered,
)
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import (
    Generation,
    Identity,
    LogprobsMode,
    MediaRef,
    Sampling,
    VersionBound,
    WeightVersion,
)
from omnifleet.wire import common_pb2, rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.batches import unpacked
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import (
    bound_to_wire,
    identity_to_wire,
    media_from_wire,
    media_to_wire,
    sampling_to_wire,
    version_from_wire,
    version_to_wire,
)
from omnifleet.wire.errors import remote_errors

__all__ = [
    "Done",
    "Event",
    "Failed",
    "PromptSeen",
    "Rendered",
    "RolloutClient",
    "Tokens",
    "event_from_wire",
]
_WAIT_AND_RETRY = (Reason.OVERLOADED, Reason.NO_WORKER)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Chat messages as unexpanded prompt tokens, their media in order, and the text that was tokenised."""

    token_ids: list[int]
    media: tuple[MediaRef, ...]
    text: str


class RolloutClient:
    """Speaks to a Rollout service. Every call raises OmnifleetError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rollout_pb2_grpc.RolloutStub(channel)  # type: ignore[no-untyped-call]

    @staticmethod
    @asynccontextmanager
    async def open(address: str, secret: str = "") -> AsyncIterator[RolloutClient]:
        """Connect to "host:port" with a bearer token."""
        async with open_channel(address, secret) as channel:
            yield RolloutClient(channel)

    async def generate(
        self,
        *,
        prompt_token_ids: Sequence[int],
        media: Sequence[MediaRef] = (),
        sampling: Sampling,
        identity: Identity,
        bound: VersionBound = VersionBound(),
        logprobs_mode: LogprobsMode | None = None,
        deadline_s: float,
        return_prompt_token_ids: bool = True,
        return_text: bool = False,
        extras: Sequence[str] = (),
        priority: int = 0,
        request_id: str = "",
    ) -> Generation:
        """All `sampling.n` samples of one prompt.

        prompt_token_ids: unexpanded (one placeholder a media item). logprobs_mode: refused if the engine's differs.
        extras: "routed_experts", "sampling_mask": refused if the engine returns none.
        deadline_s: seconds for everything, waits and retries included. A sample that fails is in `failures`;
        a request that is refused raises. OVERLOADED and NO_WORKER are retried as advised until the deadline.
        """
        events = self.stream(
            prompt_token_ids=prompt_token_ids,
            media=media,
            sampling=sampling,
            identity=identity,
            bound=bound,
            logprobs_mode=logprobs_mode,
            deadline_s=deadline_s,
            return_prompt_token_ids=return_prompt_token_ids,
            return_text=return_text,
            extras=extras,
            priority=priority,
            request_id=(request_id := request_id or uuid.uuid4().hex),
            whole_samples=True,
        )
        async with aclosing(events):
            return await gathered(events, request_id, sampling.n)

    async def stream(
        self,
        *,
        prompt_token_ids: Sequence[int],
        media: Sequence[MediaRef] = (),
        sampling: Sampling,
        identity: Identity,
        bound: VersionBound = VersionBound(),
        logprobs_mode: LogprobsMode | None = None,
        deadline_s: float,
        return_prompt_token_ids: bool = True,
        return_text: bool = False,
        extras: Sequence[str] = (),
        priority: int = 0,
        request_id: str = "",
        whole_samples: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Like `generate`, as events: one PromptSeen, then Tokens, Done and Failed of all samples interleaved.

        whole_samples: a gateway sends each sample's tokens at once, at its end: about 6 bytes a token instead of 25.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            identity=identity_to_wire(identity),
            tokens=rollout_pb2.TokenPrompt(token_ids=prompt_token_ids),
            media=[media_to_wire(ref) for ref in media],
            sampling=sampling_to_wire(sampling),
            weight_version=bound_to_wire(bound),
            priority=priority,
            return_prompt_token_ids=return_prompt_token_ids,
            return_text=return_text,
            expected_logprobs_mode=str(logprobs_mode or ""),
            whole_samples=whole_samples,
            batched=True,
            extras=extras,
        )
        async with aclosing(self._events(request, time.monotonic() + deadline_s)) as messages:
            async for message in messages:
                yield event_from_wire(message)

    async def _events(
        self, request: rollout_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[rollout_pb2.GenerateEvent, None]:
        while True:
            began = False
            try:
                async with aclosing(self._once(request, max(0.0, deadline - time.monotonic()))) as messages:
                    async for message in messages:
                        began = True
                        yield message
                return
            except OmnifleetError as error:
                pause = max(0.05, error.retry_after_ms / 1000) * random.uniform(1.0, 1.25)
                late = time.monotonic() + pause >= deadline
                if began or late or error.reason not in _WAIT_AND_RETRY:
                    raise
            await asyncio.sleep(pause)

    async def _once(
        self, request: rollout_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[rollout_pb2.GenerateEvent, None]:
        """One call; closing it cancels the call, so that the service stops at once."""
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            with remote_errors():
                async for message in call:
                    for event in unpacked(message):
                        yield event
        finally:
            call.cancel()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        identity: Identity,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        deadline_s: float = 30.0,
    ) -> Rendered:
        """Chat messages -> exact prompt tokens by the checkpoint's own template.

        Media parts are `image_url` with media://DIGEST or a data URL.
        """
        chat = rollout_pb2.ChatPrompt(
            messages_json=json.dumps(list(messages)),
            tools_json=json.dumps(list(tools)) if tools else "",
            template_kwargs_json=json.dumps(dict(template_kwargs)) if template_kwargs else "",
        )
        request = rollout_pb2.RenderRequest(chat=chat, identity=identity_to_wire(identity))
        with remote_errors():
            reply = await self._stub.Render(request, timeout=deadline_s)
        return Rendered([*reply.token_ids], tuple(media_from_wire(m) for m in reply.media), reply.text)

    async def score_tokens(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        media: Sequence[MediaRef] = (),
        *,
        deadline_s: float = 60.0,
    ) -> tuple[list[float], WeightVersion]:
        """Logprobs of `token_ids` after the prompt, one each, and the weights that gave them."""
        request = rollout_pb2.ScoreTokensRequest(
            prompt_token_ids=prompt_token_ids, token_ids=token_ids, media=[media_to_wire(m) for m in media]
        )
        with remote_errors():
            reply = await self._stub.ScoreTokens(request, timeout=deadline_s)
        return [*reply.logprobs], version_from_wire(reply.version)

    async def abort(self, request_ids: Sequence[str], *, deadline_s: float = 10.0) -> int:
        """End requests now; each of their samples finishes with reason `abort`. Returns how many were running."""
        request = rollout_pb2.AbortRequestsRequest(request_ids=request_ids)
        with remote_errors():
            reply = await self._stub.AbortRequests(request, timeout=deadline_s)
        return int(reply.aborted)

    async def set_budget(
        self, run: str, samples: int, version: WeightVersion | None = None, *, deadline_s: float = 10.0
    ) -> int:
        """Let the gateway start `samples` of a run from now on, reckoned for `version`; more get OVERLOADED (HTTP 429).

        Replaces the last budget; what was left of that. A run that was never given one is not limited.
        """
        request = rollout_pb2.SetBudgetRequest(run=run, samples=samples, version=version_to_wire(version))
        with remote_errors():
            reply = await self._stub.SetBudget(request, timeout=deadline_s)
        return int(reply.unused)

    async def status(self, *, deadline_s: float = 10.0) -> common_pb2.ServiceStatus:
        """Counters and facts of the service."""
        with remote_errors():
            reply: common_pb2.ServiceStatus = await self._stub.Status(
                common_pb2.StatusRequest(), timeout=deadline_s
            )
        return reply
