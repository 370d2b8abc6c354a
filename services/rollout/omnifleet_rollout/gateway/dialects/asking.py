"""From a dialect's body and headers to one request of the gateway: who asks, under which bound, for how long."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from omnifleet.client.rollout import Event, Rendered, event_from_wire
from omnifleet.errors import Reason, invalid
from omnifleet.types import Identity, Sampling, VersionBound
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import bound_to_wire, identity_to_wire, media_to_wire, sampling_to_wire
from omnifleet_rollout.gateway.dialects.fields import CommonFields, bound_of, identity_of, timeout_of
from omnifleet_rollout.gateway.gateway import MODEL, Gateway
from omnifleet_rollout.gateway.session_key import merged


@dataclass(frozen=True, slots=True)
class Ask:
    """One request but for its prompt. timeout_s: None = the gateway's own limit. extras: see `CommonFields`."""

    who: Identity
    sampling: Sampling
    bound: VersionBound
    priority: int
    model: str
    timeout_s: float | None
    extras: tuple[str, ...] = ()


def ask(gateway: Gateway, http: Request, request: CommonFields) -> Ask:
    """Read body and headers. Raises NOT_FOUND for another model, INVALID_REQUEST, FORBIDDEN."""
    model = request.model if request.model is not None else MODEL
    if model != MODEL and model not in (names := gateway.models()):
        raise invalid(f"model {model!r} is not served; known: {', '.join(names)}", reason=Reason.NOT_FOUND)
    if http.headers.get("x-omnifleet-provenance") == "full":
        request.return_provenance = True
    proven: Identity | None = getattr(http.state, "proven", None)
    return Ask(
        who=merged(identity_of(request, http.headers), proven),
        sampling=request.sampling(gateway.defaults),
        bound=bound_of(request, http.headers, lambda: gateway.fleet.view().target_version),
        priority=request.priority,
        model=model,
        timeout_s=timeout_of(http.headers),
        extras=request.extras,
    )


async def events(
    gateway: Gateway, asked: Ask, request_id: str, prompt: Rendered, *, with_ids: bool, stream: bool
) -> AsyncGenerator[Event, None]:
    """Events of all samples. with_ids: the echo carries the expanded prompt. stream: tokens as they come, else at the end."""
    request = rollout_pb2.GenerateRequest(
        request_id=request_id,
        identity=identity_to_wire(asked.who),
        tokens=rollout_pb2.TokenPrompt(token_ids=prompt.token_ids),
        media=[media_to_wire(ref) for ref in prompt.media],
        sampling=sampling_to_wire(asked.sampling),
        weight_version=bound_to_wire(asked.bound),
        priority=asked.priority,
        return_prompt_token_ids=with_ids,
        whole_samples=not stream,
        extras=asked.extras,
    )
    async with aclosing(gateway.generate(request, asked.timeout_s)) as batches:
        async for batch in batches:
            for message in batch:
                yield event_from_wire(message)
