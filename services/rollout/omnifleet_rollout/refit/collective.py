"""Transport `nccl`: buckets broadcast to all receivers of a group (gloo where the weights are on a CPU)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_refit.group import Group, join
from omnifleet_rollout.refit.buckets import Memory, Verification, layout
from omnifleet_rollout.refit.source import Seat

_GROUPS = 2


class Collective:
    """The groups that this rank was in last: the fleet's, and one of its own. `offset`: our rank within the engine."""

    def __init__(self, memory: Memory, offset: int = 0) -> None:
        self._memory, self._offset = memory, offset
        self._groups: dict[str, Group] = {}
        self._using: Group | None = None
        self._cancelled = False

    def receive(self, body: Mapping[str, Any], source: str) -> dict[str, torch.Tensor]:
        """Take part in the broadcast of all buckets, verify them; views of the tensors. Blocks; for a thread of its own.

        Raises REFIT_REJECTED (bytes or layout), UNAVAILABLE (the group broke), DEADLINE. What serves is not touched.
        """
        seat = Seat.parse(source)
        deadline = time.monotonic() + seat.deadline_s
        buckets = layout(body)
        buffers = self._memory.take([bucket.size for bucket in buckets])
        self._cancelled = False
        group = self._join(seat)
        verification = Verification(body, self._memory.device)
        try:
            group.say_ready()
            with group.stream():
                for bucket, data in zip(buckets, buffers, strict=True):
                    group.broadcast(data, deadline)
                    verification.queue(bucket, data)
                group.finish(deadline)
        except OmnifleetError:
            self._memory.release()  # a broken group may still write into it
            raise
        with group.stream():
            verification.check()
        return self._memory.cut(buckets, buffers)

    def cancel(self) -> None:
        """End a `receive` that runs in another thread. Idempotent."""
        self._cancelled = True
        if self._using is not None:
            self._using.abort()

    def _join(self, seat: Seat) -> Group:
        group = self._groups.pop(seat.name, None)
        if group is None or group.broken:
            while len(self._groups) >= _GROUPS:
                self._groups.pop(next(iter(self._groups))).abort()
            group = join(
                seat.host,
                seat.port,
                seat.name,
                rank=seat.rank + self._offset,
                size=seat.size,
                device=self._memory.device,
                timeout_s=seat.deadline_s,
            )
        self._groups[seat.name] = self._using = group
        if self._cancelled:
            group.abort()
            raise retryable(Reason.UNAVAILABLE, "the stage was dropped before its group met")
        return group
