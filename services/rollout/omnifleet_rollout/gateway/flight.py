"""One request on its way: its samples' tasks, its event queue and the one prompt that all its samples must share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import VersionBound
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import bound_from_wire
from omnifleet_rollout.gateway.routing import Ask

_CHUNKS = 256  # events that may wait for a slow reader, a request


@dataclass(slots=True)
class Flight:
    """deadline: seconds of the event loop's clock. home: worker of the first sample, preferred by the others.

    finished: samples that are complete. aborted, broken: why its tasks were cancelled from outside.
    placed: sample -> worker, until its task begins.
    """

    request: rollout_pb2.GenerateRequest
    deadline: float
    ask: Ask
    bound: VersionBound
    home: str = ""
    aborted: bool = False
    finished: int = 0
    broken: OmnifleetError | None = None
    echo: rollout_pb2.PromptEcho | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    placed: dict[int, str] = field(default_factory=dict)
    _events: asyncio.Queue[rollout_pb2.GenerateEvent] = field(default_factory=asyncio.Queue)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CHUNKS))

    @property
    def extras(self) -> tuple[str, ...]:
        """What each of its samples must have beside tokens: asked for, or, in a whole sample, what the engine returns."""
        told = self.echo.extras if self.echo is not None and self.request.whole_samples else ()
        return tuple(self.request.extras or told)

    @staticmethod
    def of(request: rollout_pb2.GenerateRequest, deadline: float) -> Flight:
        """A request that was checked."""
        identity = request.identity
        digests = tuple(ref.digest for ref in request.media)
        ask = Ask(identity.run, identity.session, digests, request.sampling.n)
        return Flight(request, deadline, ask, bound_from_wire(request.weight_version))

    async def put(self, event: rollout_pb2.GenerateEvent) -> None:
        """Queue an event; waits while the reader is `_CHUNKS` behind."""
        await self._room.acquire()
        self._events.put_nowait(event)

    def put_last(self, event: rollout_pb2.GenerateEvent) -> None:
        """Queue what belongs to the end of a sample; never waits, since that is two events at most."""
        self._events.put_nowait(event)

    async def get(self) -> list[rollout_pb2.GenerateEvent]:
        """The next events: all that are there, at least one."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "prompt" or (kind == "chunk" and not self.request.whole_samples):
                self._room.release()
        return events

    async def see(self, echo: rollout_pb2.PromptEcho) -> None:
        """Pass the first echo on. Raises CORRUPT if a later worker saw another prompt or gives other logprobs."""
        if self.echo is None:
            self.echo = echo
            await self.put(rollout_pb2.GenerateEvent(prompt=echo))
            return
        first, now = self.echo, echo
        if (first.prompt_hash, first.logprobs_mode) != (now.prompt_hash, now.logprobs_mode):
            raise OmnifleetError(
                Reason.CORRUPT,
                f"workers {first.worker} and {now.worker} disagree about request {self.request.request_id}: "
                f"prompt {first.prompt_hash[:12]} {first.logprobs_mode} / {now.prompt_hash[:12]} {now.logprobs_mode}",
                knob="one checkpoint and logprobs_mode a pool",
            )

    def abort(self) -> None:
        """End now: each sample finishes with reason `abort` and what it has."""
        self.aborted = True
        for task in self.tasks:
            task.cancel()

    def break_off(self, error: OmnifleetError) -> None:
        """End now: each sample fails with `error`."""
        self.broken = error
        for task in self.tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel what still runs; the workers see it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
