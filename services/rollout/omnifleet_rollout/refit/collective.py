"""Transport `nccl`: buckets broadcast to all receivers of a group (gloo where the weights are on a CPU)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_rollout.refit.buckets import Memory, Verification, cut, layout
from omnifleet_rollout.refit.group import Group, Seat, join


class Collective:
    """The group that this rank is in, kept while its name stays the same. `offset`: our rank within the engine."""

    def __init__(self, memory: Memory, offset: int = 0) -> None:
        self._memory, self._offset = memory, offset
        self._name = ""
        self._group: Group | None = None
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
        verification = Verification(body)
        try:
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
        return cut(buckets, buffers)

    def cancel(self) -> None:
        """End a `receive` that runs in another thread. Idempotent."""
        self._cancelled = True
        if self._group is not None:
            self._group.abort()

    def _join(self, seat: Seat) -> Group:
        if self._group is None or self._group.broken or self._name != seat.name:
            if self._group is not None:
                self._group.abort()
                self._group = None
            self._group, self._name = join(seat, self._offset, self._memory.device), seat.name
        if self._cancelled:
            self._group.abort()
            raise retryable(Reason.UNAVAILABLE, "the stage was dropped before its group met")
        return self._group
