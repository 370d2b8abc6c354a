"""One sender's part of a round: buckets through groups, one group after another, in the order that all members know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from omnifleet.errors import Reason, retryable
from omnifleet_refit.group import Group


@dataclass(frozen=True, slots=True)
class Errand:
    """What a group of `size` members, that meets under `name`, is sent."""

    name: str
    size: int
    buckets: Sequence[torch.Tensor]


class Sending:
    """Holds the groups of the last membership, since most rounds have the same members."""

    def __init__(self, open_group: Callable[[str, int, float], Group]) -> None:
        """open_group: takes (name, size, seconds), blocks until all members met, raises UNAVAILABLE."""
        self._open = open_group
        self._membership = ""
        self._groups: dict[str, Group] = {}
        self.began = 0.0
        """When the first bucket of the last round was sent, monotonic s."""

    @property
    def whole(self) -> bool:
        """True while there are groups, and none is broken."""
        return bool(self._groups) and not any(group.broken for group in self._groups.values())

    def has(self, name: str) -> bool:
        """True if the group of this name has met."""
        return name in self._groups

    def enter(self, membership: str) -> None:
        """From now on groups are of these members; others are left."""
        if membership != self._membership:
            self.close()
            self._membership = membership

    def send(self, membership: str, errands: Sequence[Errand], deadline_s: float) -> None:
        """Blocks. Raises UNAVAILABLE (a group broke, or these are not the members any more), DEADLINE."""
        deadline = time.monotonic() + deadline_s
        for number, errand in enumerate(errands):
            group = self._groups.get(errand.name)
            if group is None:
                group = self._open(errand.name, errand.size, max(deadline - time.monotonic(), 0.001))
                if membership != self._membership:
                    group.abort()
                    raise retryable(Reason.UNAVAILABLE, "the round was given up while its group met")
                self._groups[errand.name] = group
            group.await_ready(deadline)
            self.began = self.began if number else time.monotonic()
            with group.stream():
                for bucket in errand.buckets:
                    group.broadcast(bucket, deadline)
                group.finish(deadline)

    def close(self) -> None:
        """Leave all groups, from any thread. Idempotent."""
        self._membership = ""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()
