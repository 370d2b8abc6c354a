"""Client of the reward service: score batches, ask what scorers there are and what a recipe can reach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import omnifleet
from omnifleet.client.status import ServiceStatus, status_from_wire
from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.types import Identity, Mark, MediaRef
from omnifleet.wire import common_pb2, reward_pb2, reward_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import identity_to_wire, media_to_wire
from omnifleet.wire.errors import from_detail, remote_errors
from omnifleet.wire.server import MESSAGE_BYTES

_BATCH_ITEMS = 256
_BATCH_BYTES = MESSAGE_BYTES // 4
_CALLS = 4
_SHORT_S = 10.0
_MARKS = {
    reward_pb2.MARK_SCORED: Mark.SCORED,
    reward_pb2.MARK_UNPARSEABLE: Mark.UNPARSEABLE,
    reward_pb2.MARK_TIMEOUT: Mark.TIMEOUT,
    reward_pb2.MARK_CRASHED: Mark.CRASHED,
}
_SHORTEST_PAUSE_S = 0.05

Progress = Callable[[int, int], None]
"""Called with (items scored so far, items in all)."""


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A reply to score. response: assistant text of all turns. extra: fields of the dataset row, as JSON values."""

    id: str
    response: str
    ground_truth: str
    identity: Identity | None = None
    prompt: str = ""
    media: tuple[MediaRef, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_suffix: str = ""


@dataclass(frozen=True, slots=True)
class ItemScore:
    """score: Σ weight · component. correct: AND over scorers with an opinion, None if there is none.

    components: name@version -> score, marks: the same names -> how it came about; mark: the worst of them.
    error: set if the item is unscorable; the score then has no meaning.
    """

    id: str
    score: float
    correct: bool | None
    components: dict[str, float]
    error: OmnifleetError | None
    reward_version: str
    mark: Mark = Mark.SCORED
    marks: dict[str, Mark] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReachableMaximum:
    """The best total in a prompt's template and a reply that gets it."""

    maximum: float
    example: str
    reward_version: str


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A scorer that the service knows; params_schema is the JSON schema of its parameters."""

    name: str
    version: str
    doc: str
    params_schema: dict[str, Any]


class RewardClient:
    """`async with RewardClient.open(address, secret) as client`. Every failed call raises OmnifleetError."""

    def __init__(self, address: str, secret: str, name: str) -> None:
        self._address = address
        self._secret = secret
        self._name = name

    @classmethod
    def open(cls, address: str, secret: str = "", *, name: str = "client") -> RewardClient:
        """A client of the service at "host:port"; connects and shakes hands on entry. `name` is who calls, for logs."""
        return cls(address, secret, name)

    async def __aenter__(self) -> RewardClient:
        self._channel = open_channel(self._address, self._secret)
        self._stub: Any = reward_pb2_grpc.RewardStub(self._channel)  # type: ignore[no-untyped-call]
        self._calls = asyncio.Semaphore(_CALLS)
        hello = common_pb2.HandshakeRequest(contract=omnifleet.CONTRACT, client=self._name)
        try:
            with remote_errors():
                await self._stub.Handshake(hello, timeout=_SHORT_S, wait_for_ready=True)
        except BaseException:
            await self._channel.close(None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def score(
        self,
        items: Sequence[ScoreItem],
        scorers: Sequence[ScorerConfig],
        deadline_s: float,
        *,
        item_timeout_s: float = 0.0,
        on_progress: Progress | None = None,
    ) -> list[ItemScore]:
        """Scores in the order of `items`; an unscorable item carries its error and fails no other.

        Any number of items: they travel in batches, and a batch that a busy service refuses is sent again.
        deadline_s bounds the whole call, item_timeout_s each item (0 = the service's limit).
        Raises DEADLINE, OVERLOADED, UNAVAILABLE (retryable); INVALID_REQUEST, NOT_FOUND.
        """
        specs = [_spec(config) for config in scorers]
        requests = [
            reward_pb2.ScoreRequest(scorers=specs, items=batch, item_timeout_ms=_milliseconds(item_timeout_s))
            for batch in _batches([_item(item) for item in items])
        ]
        done = 0

        async def one(request: reward_pb2.ScoreRequest) -> list[ItemScore]:
            nonlocal done
            scores = await self._score(request, deadline_s)
            done += len(scores)
            if on_progress is not None:
                on_progress(done, len(items))
            return scores

        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                calls = [group.create_task(one(request)) for request in requests]
        except* OmnifleetError as errors:
            raise _first(errors) from None
        except* TimeoutError:
            raise retryable(Reason.DEADLINE, f"no scores within {deadline_s:g} s") from None
        return [score for call in calls for score in call.result()]

    async def _score(self, request: reward_pb2.ScoreRequest, deadline_s: float) -> list[ItemScore]:
        """One batch; waits while the service's queue is full, as long as the caller lets it."""
        while True:
            try:
                async with self._calls:
                    with remote_errors():
                        reply = await self._stub.Score(request, timeout=deadline_s)
                return [_score(message, reply.reward_version) for message in reply.scores]
            except OmnifleetError as error:
                if error.reason is not Reason.OVERLOADED or not error.retry_after_ms:
                    raise
                pause_s = error.retry_after_ms / 1000
            await asyncio.sleep(max(pause_s, _SHORTEST_PAUSE_S))

    async def reachable_maximum(
        self, scorers: Sequence[ScorerConfig], prompt_suffix: str = "", *, deadline_s: float = 30.0
    ) -> ReachableMaximum:
        """The best total of a reply to a prompt that ends in `prompt_suffix` (e.g. a template that opens "<think>").

        Raises UNSUPPORTED if a scorer gives no examples.
        """
        request = reward_pb2.ReachableMaximumRequest(
            scorers=[_spec(config) for config in scorers], prompt_suffix=prompt_suffix
        )
        with remote_errors():
            reply = await self._stub.ReachableMaximum(request, timeout=deadline_s)
        return ReachableMaximum(reply.maximum, reply.example, reply.reward_version)

    async def list_scorers(self, *, deadline_s: float = _SHORT_S) -> list[ScorerInfo]:
        """Every scorer of the service."""
        with remote_errors():
            reply = await self._stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=deadline_s)
        return [ScorerInfo(s.name, s.version, s.doc, json.loads(s.params_schema_json)) for s in reply.scorers]

    async def status(self, *, deadline_s: float = _SHORT_S) -> ServiceStatus:
        """State, counters and facts."""
        with remote_errors():
            return status_from_wire(await self._stub.Status(common_pb2.StatusRequest(), timeout=deadline_s))


def _spec(config: ScorerConfig) -> reward_pb2.ScorerSpec:
    params = json.dumps(config.params, sort_keys=True) if config.params else ""
    return reward_pb2.ScorerSpec(
        name=config.name, version=config.version, weight=config.weight, params_json=params
    )


def _item(item: ScoreItem) -> reward_pb2.ScoreItem:
    message = reward_pb2.ScoreItem(
        id=item.id,
        identity=identity_to_wire(item.identity) if item.identity else None,
        response=item.response,
        ground_truth=item.ground_truth,
        prompt=item.prompt,
        media=[media_to_wire(ref) for ref in item.media],
        extra_json=json.dumps(item.extra) if item.extra else "",
        prompt_suffix=item.prompt_suffix,
    )
    if message.ByteSize() > MESSAGE_BYTES // 2:
        raise invalid(f"item {item.id!r} has {message.ByteSize()} bytes, at most {MESSAGE_BYTES // 2}")
    return message


def _batches(items: Sequence[reward_pb2.ScoreItem]) -> Iterator[list[reward_pb2.ScoreItem]]:
    """Runs of items that fit in one message, in order; an empty run if there are none, so that names are checked."""
    batch: list[reward_pb2.ScoreItem] = []
    size = 0
    for item in items:
        if batch and (len(batch) == _BATCH_ITEMS or size + item.ByteSize() > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.ByteSize()
    yield batch


def _score(message: reward_pb2.ItemScore, reward_version: str) -> ItemScore:
    return ItemScore(
        id=message.id,
        score=message.score,
        correct=message.correct if message.HasField("correct") else None,
        components={component.scorer: component.score for component in message.components},
        error=from_detail(message.error) if message.HasField("error") else None,
        reward_version=reward_version,
        mark=_MARKS.get(message.mark, Mark.SCORED),
        marks={part.scorer: _MARKS.get(part.mark, Mark.SCORED) for part in message.components},
    )


def _first(errors: BaseExceptionGroup[OmnifleetError]) -> OmnifleetError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _milliseconds(seconds: float) -> int:
    return -(-int(seconds * 1_000_000) // 1000)
