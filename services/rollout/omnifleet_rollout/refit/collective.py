"""Transport `nccl`: buckets broadcast to all receivers of a group (gloo where the weights are on a CPU).

Whole tensors come in one group of all ranks; slices in one group for each part that this rank takes, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_refit.group import Group, join
from omnifleet_rollout.refit.buckets import Bucket, Memory, Verification, cut, layout, made_whole
from omnifleet_rollout.refit.pieces import Leg
from omnifleet_rollout.refit.source import Seat

_MEETINGS = 2


class Collective:
    """The groups that this rank was in last: the fleet's, and those of its own. `offset`: our rank within the engine."""

    def __init__(self, memory: Memory, offset: int = 0) -> None:
        self._memory, self._offset = memory, offset
        self._groups: dict[str, dict[str, Group]] = {}
        """By meeting, then by name."""
        self._using: Group | None = None
        self._cancelled = False

    def receive(self, body: Mapping[str, Any], source: str) -> dict[str, torch.Tensor]:
        """Take part in the broadcast of all buckets, verify them; views of the tensors. Blocks; for a thread of its own.

        Raises REFIT_REJECTED (bytes or layout), UNAVAILABLE (the group broke), DEADLINE. What serves is not touched.
        """
        seat = Seat.parse(source)
        return self._receive(body, seat, [(seat.of_rank(self._offset), layout(body))])

    def receive_legs(
        self, body: Mapping[str, Any], source: str, legs: Sequence[Leg]
    ) -> dict[str, torch.Tensor]:
        """Like `receive`, of the parts that this rank takes; the tensors by their names in the legs' buckets."""
        if not legs:
            return {}
        seat = Seat.parse(source)
        seats = [seat.of_part(leg.number, leg.ranks, self._offset) for leg in legs]
        return self._receive(body, seat, list(zip(seats, (leg.buckets for leg in legs), strict=True)))

    def each(
        self, body: Mapping[str, Any], source: str, staging: Memory
    ) -> Generator[dict[str, torch.Tensor], None, None]:
        """Like `receive`, bucket by bucket through one buffer: each is verified, and there until the next is asked for.

        In between, the group's stream is the current one. Whoever stops before the end breaks the group.
        """
        seat, buckets = Seat.parse(source), layout(body)
        deadline = time.monotonic() + seat.deadline_s
        (room,) = staging.take([max(bucket.size for bucket in buckets)])
        self._cancelled = False
        group = self._join(seat.name, seat.of_rank(self._offset), seat.deadline_s)
        try:
            with group.stream():
                group.say_ready()
                for bucket in buckets:
                    data, verification = room[: bucket.size], Verification(body, staging.device)
                    group.broadcast(data, deadline)
                    verification.queue(bucket, data)
                    group.finish(deadline)
                    verification.check()
                    yield cut([bucket], [data])
        except BaseException:  # of whoever reads, too
            group.abort()
            raise

    def cancel(self) -> None:
        """End a `receive` that runs in another thread. Idempotent."""
        self._cancelled = True
        if self._using is not None:
            self._using.abort()

    def _receive(
        self, body: Mapping[str, Any], meeting: Seat, legs: Sequence[tuple[Seat, Sequence[Bucket]]]
    ) -> dict[str, torch.Tensor]:
        deadline = time.monotonic() + meeting.deadline_s
        buckets = [bucket for _, inside in legs for bucket in inside]
        buffers = self._memory.take([bucket.size for bucket in buckets], sum(made_whole(body).values()))
        verification = Verification(body, self._memory.device)
        self._cancelled = False
        coming = iter(buffers)
        tensors: dict[str, torch.Tensor] = {}
        for seat, inside in legs:
            group = self._join(meeting.name, seat, deadline - time.monotonic())
            try:
                with group.stream():
                    group.say_ready()
                    for bucket, data in zip(inside, coming, strict=False):
                        group.broadcast(data, deadline)
                        verification.queue(bucket, data)
                    tensors = tensors or self._memory.cut(buckets, buffers)  # made while the bytes come
                    group.finish(deadline)
            except OmnifleetError:
                self._memory.release()  # a broken group may still write into it
                raise
        with group.stream():
            verification.check()
        return tensors

    def _join(self, meeting: str, seat: Seat, timeout_s: float) -> Group:
        groups = self._groups.pop(meeting, {})
        while len(self._groups) >= _MEETINGS:
            for old in self._groups.pop(next(iter(self._groups))).values():
                old.abort()
        self._groups[meeting] = groups
        group = groups.get(seat.name)
        if group is None or group.broken:
            group = join(
                seat.host,
                seat.port,
                seat.name,
                rank=seat.rank,
                size=seat.size,
                device=self._memory.device,
                timeout_s=max(timeout_s, 0.001),
            )
            groups[seat.name] = group
        self._using = group
        if self._cancelled:
            group.abort()
            raise retryable(Reason.UNAVAILABLE, "the stage was dropped before its group met")
        return group
