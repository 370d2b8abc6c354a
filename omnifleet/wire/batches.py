"""Generate events that are ready together as one message, and back: a gRPC message costs more than the tokens in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from omnifleet.wire import rollout_pb2

BATCH_BYTES = 1 << 20
"""Events beyond this go into a next message; one that is larger by itself goes alone."""


def packed(events: Sequence[rollout_pb2.GenerateEvent]) -> Iterator[rollout_pb2.GenerateEvent]:
    """Messages that hold `events`, in their order."""
    waiting: list[rollout_pb2.GenerateEvent] = []
    size = 0
    for event in events:
        more = event.ByteSize()
        if waiting and size + more > BATCH_BYTES:
            yield _message(waiting)
            waiting, size = [], 0
        waiting.append(event)
        size += more
    if waiting:
        yield _message(waiting)


def unpacked(message: rollout_pb2.GenerateEvent) -> Iterable[rollout_pb2.GenerateEvent]:
    """The events of a message, which may be one itself."""
    return message.batch.events if message.WhichOneof("event") == "batch" else (message,)


def _message(events: list[rollout_pb2.GenerateEvent]) -> rollout_pb2.GenerateEvent:
    if len(events) == 1:
        return events[0]
    return rollout_pb2.GenerateEvent(batch=rollout_pb2.EventBatch(events=events))
