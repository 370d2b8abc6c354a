"""Many sources in: whole ones, several to a message, some messages under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from omnifleet.client.media.calls import PASSING, MediaCalls
from omnifleet.errors import OmnifleetError
from omnifleet.wire import media_pb2
from omnifleet.wire.errors import from_detail

_SOURCES, _BYTES = 16, 4 << 20  # of a message
_AT_ONCE = 3
Outcome = media_pb2.PutReply | OmnifleetError


async def put_all(calls: MediaCalls, header: media_pb2.PutHeader, sources: Sequence[bytes]) -> list[Outcome]:
    """What came of each source. One that does not fit a message goes by itself, and so does one whose refusal passes."""
    outcomes: dict[int, Outcome] = {}
    room = asyncio.Semaphore(_AT_ONCE)

    async def together(part: list[int]) -> None:
        async with room:
            if len(part) > 1:
                request = media_pb2.PutManyRequest(header=header, sources=[sources[i] for i in part])
                reply = await calls.ask("PutMany", request)
                outcomes.update(zip(part, map(_outcome, reply.outcomes), strict=True))
            again = [i for i in part if i not in outcomes or _passes(outcomes[i])]
            for i in again:
                outcomes[i] = await _alone(calls, header, sources[i])

    await asyncio.gather(*(together(part) for part in _parts(sources)))
    return [outcomes[i] for i in range(len(sources))]


def _parts(sources: Sequence[bytes]) -> Iterator[list[int]]:
    part: list[int] = []
    held = 0
    for i, data in enumerate(sources):
        if part and (len(part) == _SOURCES or held + len(data) > _BYTES):
            yield part
            part, held = [], 0
        part.append(i)
        held += len(data)
    if part:
        yield part


async def _alone(calls: MediaCalls, header: media_pb2.PutHeader, data: bytes) -> Outcome:
    """As a stream of chunks, with the retries of a call of its own."""
    own = media_pb2.PutHeader()
    own.CopyFrom(header)
    own.bytes = len(data)
    try:
        reply: media_pb2.PutReply = await calls.put(own, data)
    except OmnifleetError as error:
        return error
    return reply


def _outcome(message: media_pb2.PutOutcome) -> Outcome:
    return from_detail(message.error) if message.HasField("error") else message.reply


def _passes(outcome: Outcome) -> bool:
    return isinstance(outcome, OmnifleetError) and outcome.reason in PASSING
