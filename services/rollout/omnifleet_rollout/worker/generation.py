"""One Generate call: checks, admission, n samples side by side, and what becomes of each."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from omnifleet.address import token_digest
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import FinishReason, Sampling, VersionSpan
from omnifleet.wire import rollout_pb2
from omnifleet.wire.batches import packed
from omnifleet.wire.codec import (
    bound_from_wire,
    media_from_wire,
    sampling_from_wire,
    spans_from_wire,
    spans_to_wire,
)
from omnifleet.wire.server import MESSAGE_BYTES
from omnifleet_rollout.engine.port import (
    EXTRAS,
    Engine,
    EngineDelta,
    EngineFacts,
    EnginePrompt,
    EngineRequest,
)
from omnifleet_rollout.worker.extras import Extras
from omnifleet_rollout.worker.gate import Ending, Flight, Gate, ended_error
from omnifleet_rollout.worker.mailbox import PACE_S, WHOLE_PACE_S, Mailbox
from omnifleet_rollout.worker.provenance import Provenance

log = logging.getLogger("omnifleet.rollout.generation")
_LARGEST = MESSAGE_BYTES - (64 << 10)
"""Bytes of the end of a sample: it goes in one message, alone."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed the checks. prefix: reply tokens that exist already, made elsewhere. in_bulk: see `EngineRequest`."""

    id: str
    sampling: Sampling
    prompt: EnginePrompt
    prefix: tuple[int, ...]
    prefix_spans: tuple[VersionSpan, ...]
    priority: int
    want_text: bool
    in_bulk: bool


@dataclass(slots=True)
class Reply:
    """One sample so far: all its tokens and where they came from."""

    index: int
    flight: Flight
    tokens: list[int]
    provenance: Provenance
    extras: Extras
    cached_tokens: int = 0


class Generation:
    """Turns requests into events. Holds no state of its own between calls."""

    def __init__(self, engine: Engine, gate: Gate, counters: Counters) -> None:
        self._engine, self._gate, self._counters = engine, gate, counters
        self._standing = gate.standing

    async def run(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateEvent, None]:
        """Events of one call, or batches of them if it asks for these. Closing the iterator aborts its samples.

        Raises OmnifleetError before the first event only; later failures are events of their sample.
        """
        sampling = check_request(request, self._engine.facts)
        bound = bound_from_wire(request.weight_version)
        self._gate.reserve(sampling.n)
        flights = [Flight(request.request_id, bound) for _ in range(sampling.n)]
        tasks: list[asyncio.Task[None]] = []
        try:
            self._standing.check_bound(bound)  # before media is fetched for nothing; `enter` checks again
            call = await self._prepare(request, sampling)
            await self._gate.enter(flights, bound)
            mailbox = Mailbox(sampling.n, WHOLE_PACE_S if request.whole_samples else PACE_S)
            for index, flight in enumerate(flights):
                task = asyncio.create_task(self._sample(call, index, flight, mailbox))
                task.add_done_callback(partial(self._broke_off, mailbox, index))
                tasks.append(task)
            held = [self._echo(request, call)]
            if not (request.batched and request.whole_samples):
                yield held.pop()
            async with aclosing(mailbox.batches()) as batches:
                async for batch in batches:
                    events = held + batch
                    held = []
                    for message in packed(events) if request.batched else events:
                        yield message
        finally:
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                # Also when the caller's cancellation arrives during that wait: places must never be lost.
                for flight in flights:
                    self._gate.leave(flight)
                self._gate.give_back(sampling.n)

    async def _prepare(self, request: rollout_pb2.GenerateRequest, sampling: Sampling) -> Call:
        media = [media_from_wire(ref) for ref in request.media]
        prompt = await self._engine.prepare(request.tokens.token_ids, media, request.identity.run)
        room = self._engine.facts.max_model_len - len(prompt.token_ids)
        return Call(
            id=request.request_id or uuid.uuid4().hex,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            prompt=prompt,
            prefix=tuple(request.continuation.token_ids),
            prefix_spans=tuple(spans_from_wire(request.continuation.spans)),
            priority=request.priority,
            want_text=request.return_text,
            in_bulk=request.whole_samples,
        )

    def _echo(self, request: rollout_pb2.GenerateRequest, call: Call) -> rollout_pb2.GenerateEvent:
        ids = call.prompt.token_ids
        echo = rollout_pb2.PromptEcho(
            prompt_hash=token_digest(ids),
            token_ids=ids if request.return_prompt_token_ids else (),
            prompt_tokens=len(ids),
            worker=self._standing.worker,
            logprobs_mode=str(self._engine.facts.logprobs_mode),
            media=request.media,
            engine=self._engine.facts.info,
            processor_fingerprints=call.prompt.fingerprints,
            max_tokens=call.sampling.max_tokens,
            extras=self._engine.facts.extras,
        )
        return rollout_pb2.GenerateEvent(prompt=echo)

    async def _sample(self, call: Call, index: int, flight: Flight, mailbox: Mailbox) -> None:
        provenance = Provenance(self._standing.worker, call.prefix_spans, len(call.prefix))
        reply = Reply(index, flight, list(call.prefix), provenance, Extras(len(call.prefix)))
        try:
            finished = _finished(reply, await self._reply(call, reply, mailbox))
        except OmnifleetError as error:
            self._counters.add("samples_failed")
            mailbox.fail(index, error)
        except (RuntimeError, ValueError, LookupError, OSError, TypeError) as error:
            self._counters.add("samples_failed")
            message = f"{type(error).__name__}: {error}"
            mailbox.fail(index, OmnifleetError(Reason.ENGINE_ERROR, message, retryable=True))
        else:
            self._counters.add("samples_finished")
            mailbox.finish(index, finished)
        finally:
            self._gate.leave(flight)

    def _broke_off(self, mailbox: Mailbox, index: int, task: asyncio.Task[None]) -> None:
        """After a defect: whoever reads must not wait for an end that nobody sends."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sample %d broke off", index, exc_info=error)
            self._counters.add("samples_failed")
            mailbox.fail(index, OmnifleetError(Reason.INTERNAL, f"{type(error).__name__}: {error}"))

    async def _reply(self, call: Call, reply: Reply, mailbox: Mailbox) -> EngineDelta:
        """Run engine requests until the sample is complete: one, or more if a refit made it start again."""
        flight = reply.flight
        while len(reply.tokens) < call.sampling.max_tokens:
            last = await self._segment(call, reply, mailbox)
            if flight.ending is None:
                return last
            error = ended_error(flight.ending, self._standing)
            if error is not None:
                raise error
            if flight.ending is Ending.CANCELLED:
                return last
            await self._gate.until_open(flight.bound)
            self._standing.check_serving()
            flight.ending, flight.tokens = None, 0
        return EngineDelta(finish=FinishReason.LENGTH)

    async def _segment(self, call: Call, reply: Reply, mailbox: Mailbox) -> EngineDelta:
        """One engine request to its end; returns its last delta."""
        request = self._engine_request(call, reply)
        flight = reply.flight
        flight.engine_id = request.id
        reply.provenance.start_segment()
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                if flight.ending is not None:
                    # Tokens that arrive after we ended the request may be of other weights: they were never emitted.
                    return EngineDelta(finish=FinishReason.ABORT)
                self._take(delta, reply, mailbox)
                if delta.finish is not None:
                    _check_length(delta, len(reply.tokens), call.sampling.max_tokens)
                    return delta
        raise OmnifleetError(Reason.ENGINE_ERROR, "the engine ended a reply without a reason", retryable=True)

    def _take(self, delta: EngineDelta, reply: Reply, mailbox: Mailbox) -> None:
        count = len(delta.token_ids)
        reply.extras.take(delta)
        if count:
            _check_logprobs(delta)
            reply.tokens.extend(delta.token_ids)
            reply.flight.tokens += count
            span = reply.provenance.add(count, self._standing.version)
            self._counters.add("tokens_generated", count)
            mailbox.tokens(reply.index, delta.token_ids, delta.logprobs, delta.text, span)
        if delta.finish is not None:
            reply.cached_tokens = max(reply.cached_tokens, delta.cached_tokens)
            if delta.labels and not reply.provenance.settle(delta.labels, self._standing.labels):
                self._counters.add("span_mismatches")

    def _engine_request(self, call: Call, reply: Reply) -> EngineRequest:
        done = len(reply.tokens)
        sampling = replace(
            call.sampling,
            n=1,
            max_tokens=call.sampling.max_tokens - done,
            min_tokens=max(0, call.sampling.min_tokens - done),
            seed=_seed(call.sampling.seed, reply.index, done),
        )
        return EngineRequest(
            id=f"{call.id}-{reply.index}-{uuid.uuid4().hex[:8]}",
            prompt=call.prompt,
            sampling=sampling,
            salt=str(self._standing.version),
            prefix=tuple(reply.tokens),
            priority=call.priority,
            want_text=call.want_text,
            in_bulk=call.in_bulk,
        )


def check_request(request: rollout_pb2.GenerateRequest, facts: EngineFacts) -> Sampling:
    """What can be refused without looking at engine or weights. Raises UNSUPPORTED, INVALID_REQUEST, LOGPROBS_MODE."""
    if request.WhichOneof("prompt") != "tokens":
        raise OmnifleetError(
            Reason.UNSUPPORTED, "a worker takes token prompts; send chat to the gateway, which renders it"
        )
    sampling = sampling_from_wire(request.sampling)
    if sampling.n < 1 or sampling.max_tokens < 1:
        raise invalid(f"sampling.n {sampling.n} and max_tokens {sampling.max_tokens} must be at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise invalid(f"temperature {sampling.temperature} must be >= 0 and top_p {sampling.top_p} in (0, 1]")
    if not request.tokens.token_ids:
        raise invalid("the prompt has no tokens")
    if request.continuation.token_ids and sampling.n != 1:
        raise invalid(f"a continuation is of one sample, sampling.n is {sampling.n}")
    for name in request.extras:
        if name not in EXTRAS:
            raise invalid(f"extras: {name!r} is none of {', '.join(EXTRAS)}")
        if name not in facts.extras:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"{facts.info} returns no {name} here",
                knob=f"rollout.engine.return_{name}",
            )
    if request.expected_logprobs_mode not in ("", str(facts.logprobs_mode)):
        raise OmnifleetError(
            Reason.LOGPROBS_MODE,
            f"the engine gives {facts.logprobs_mode} logprobs, the request expects {request.expected_logprobs_mode}",
            knob="rollout.logprobs_mode",
        )
    return sampling


def _check_logprobs(delta: EngineDelta) -> None:
    """Raises ENGINE_ERROR for a token that could not have been drawn: no trainer can use it, and no number stands for it."""
    if all(map(math.isfinite, delta.logprobs)):
        return
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    token, logprob = next(pair for pair in pairs if not math.isfinite(pair[1]))
    raise retryable(
        Reason.ENGINE_ERROR,
        f"the engine gave token {token} a logprob of {logprob}: its weights may be broken",
    )


def _check_length(delta: EngineDelta, tokens: int, asked: int) -> None:
    """Raises ENGINE_ERROR for a reply that ends by its length and is shorter: tokens were lost on the way from the model."""
    if delta.finish is FinishReason.LENGTH and tokens != asked:
        raise retryable(
            Reason.ENGINE_ERROR, f"the engine ended a reply by its length after {tokens} of {asked} tokens"
        )


def _finished(reply: Reply, last: EngineDelta) -> rollout_pb2.Finished:
    """The end of a sample. Raises LIMIT_EXCEEDED if what came beside its tokens fits into no message."""
    finished = rollout_pb2.Finished(
        finish_reason=str(last.finish),
        stop_reason=last.stop_reason,
        spans=spans_to_wire(reply.provenance.spans),
        tokens=len(reply.tokens),
        cached_prompt_tokens=reply.cached_tokens,
        routed_experts=reply.extras.routed_experts(),
        sampling_mask=reply.extras.sampling_mask(),
    )
    if finished.ByteSize() > _LARGEST:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"routed experts of {len(finished.routed_experts)} and a sampling mask of {len(finished.sampling_mask)} bytes "
            f"do not fit into a message of {MESSAGE_BYTES}",
            knob="rollout.engine.max_model_len",
        )
    return finished


def _seed(seed: int | None, index: int, done: int) -> int | None:
    """Its own stream a sample; the rest of a continued sample must not repeat the first draws."""
    return None if seed is None else (seed + index + (done << 20)) % (1 << 63)
