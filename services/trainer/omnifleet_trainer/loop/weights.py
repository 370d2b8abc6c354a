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

    def __init__(
        self, policy: Policy, *, run: str, lineage: str, step: int, thread: ThreadPoolExecutor | None = None
    ) -> None:
        """step: steps that made the weights which `policy` holds. thread: that made the policy, one worker; default: new."""
        self.policy = policy
        self._run = run
        self._lineage = lineage
        self._step = step
        self.thread = thread or _new_thread()

    @staticmethod
    async def open(make: Callable[[], Policy], *, run: str, lineage: str, step: int) -> Weights:
        """Make the policy on the thread that will use it. Raises what `make` raises."""
        thread = _new_thread()
        try:
            policy = await asyncio.get_running_loop().run_in_executor(thread, make)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return Weights(policy, run=run, lineage=lineage, step=step, thread=thread)

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
        return await asyncio.get_running_loop().run_in_executor(self.thread, call)

    def trained(self) -> None:
        """One more step is in the weights."""
        self._step += 1

    def close(self) -> None:
        """Wait for the call that runs, then free the policy."""
        self.thread.submit(self.policy.close).result()
        self.thread.shutdown()


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="policy")
