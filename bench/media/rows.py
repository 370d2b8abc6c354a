"""What is timed in turn with others: a call, until all bytes were touched, and letting go of what it answered."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np


def touch(data: Any) -> int:
    """Read every byte (all but the last seven of an odd length, which are read one by one)."""
    flat = np.frombuffer(data, np.uint8).reshape(-1) if not isinstance(data, np.ndarray) else data.reshape(-1)
    whole = len(flat) // 8 * 8
    return int(np.bitwise_xor.reduce(flat[:whole].view(np.uint64))) ^ int(flat[whole:].sum())


Call = Callable[[], Awaitable[Any]]


class Row:
    """What is timed: `call` answers what it holds. forget: undoes what the call left behind; timed as letting go."""

    def __init__(self, call: Call, forget: Callable[[], None] = lambda: None) -> None:
        self.call, self.forget = call, forget
        self.took: list[float] = []
        self.let_go: list[float] = []

    async def once(self) -> None:
        """Run and time it."""
        start = time.perf_counter()
        held = await self.call()
        got = time.perf_counter()
        del held
        self.forget()
        self.took.append((got - start) * 1e3)
        self.let_go.append((time.perf_counter() - got) * 1e3)

    @property
    def median_ms(self) -> tuple[float, float]:
        """Until all bytes were touched, and to let go."""
        return statistics.median(self.took), statistics.median(self.let_go)


async def in_turn(rounds: int, rows: dict[str, Row], chance: random.Random) -> dict[str, tuple[float, float]]:
    """Every round runs each row once, in an order of its own, so that noise and caches meet all of them."""
    for _ in range(rounds):
        for row in chance.sample(list(rows.values()), len(rows)):
            await row.once()
    return {name: row.median_ms for name, row in rows.items()}
