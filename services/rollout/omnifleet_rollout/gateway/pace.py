"""When those who were refused should come back: spread out, about as fast as samples end."""

from __future__ import annotations

from collections import deque

_AHEAD = 2.0
"""Retries for each sample that ends: a few too many keep the queues full, and none costs much."""
_LEAST_PER_S = 100.0
_WINDOW_S = 5.0
_LONGEST_S = 30.0


class RetryPace:
    """Gives every refusal a place in the time to come. Pure: callers bring the clock, in seconds.

    With one advice for all, thousands that are refused come back together, and a gateway that spends its time on refusals
    takes none of the replies that would make room.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self._last = 0.0

    def ended(self, now: float) -> None:
        """A sample has ended."""
        self._ends.append(now)
        self._forget(now)

    def advise(self, now: float) -> float:
        """Seconds after which one more should come back, at most half a minute."""
        self._forget(now)
        per_s = max(_LEAST_PER_S, _AHEAD * len(self._ends) / _WINDOW_S)
        self._last = min(max(self._last, now) + 1 / per_s, now + _LONGEST_S)
        return self._last - now

    def _forget(self, now: float) -> None:
        while self._ends and self._ends[0] < now - _WINDOW_S:
            self._ends.popleft()
