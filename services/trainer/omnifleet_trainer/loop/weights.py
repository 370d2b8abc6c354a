"""Which weights train and which serve. A version's number is the count of steps that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from omnifleet.types import WeightVersion
from omnifleet_trainer.policy.port import Policy

Value = TypeVar("Value")


class Weights:
    """The policy on its own thread: backends are not reentrant and keep state per thread."""

    def __init__(self, policy: Policy, *, run: str, lineage: str, step: int) -> None:
        """step: steps that made the weights which `policy` holds now."""
        self.policy = policy
        self._run = run
        self._lineage = lineage
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    @property
    def step(self) -> int:
        """Steps trained; the number of the weights that the next step trains."""
        return self._step

    @property
    def version(self) -> WeightVersion:
        """The weights that the policy holds."""
        return WeightVersion(self._run, self._lineage, self._step)

    async def on_thread(self, call: Callable[[], Value]) -> Value:
        """Run a blocking call of the policy. It can't be cancelled, only not waited for."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def trained(self) -> None:
        """One more step is in the weights."""
        self._step += 1

    def close(self) -> None:
        """Wait for the call that runs, then free the policy."""
        self._thread.submit(self.policy.close).result()
        self._thread.shutdown()
