"""The producer: one task a group, as many as there are credits, for as long as there are prompts."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import replace

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Group, Identity, Outcome, Sampling, VersionBound, WeightVersion
from omnifleet_trainer.ledger import PromptLease
from omnifleet_trainer.ledger.port import CUT_OFF
from omnifleet_trainer.loop.admission import Admission
from omnifleet_trainer.loop.buffer import ReadyBuffer
from omnifleet_trainer.loop.failures import FATAL, RefusedSample, first_of, outcome_of, tries_of
from omnifleet_trainer.loop.prompting import Asker
from omnifleet_trainer.loop.prompts import Prompts

log = logging.getLogger("omnifleet.trainer.rollouts")

_SLACK_S = 600.0  # a lease outlives its rollout; a dead owner's leases are taken back at resume anyway
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class Rollouts:
    """Turns prompts into ready groups until cancelled. A failure never becomes a reward."""

    def __init__(
        self,
        prompts: Prompts,
        prompter: Asker,
        buffer: ReadyBuffer,
        admission: Admission,
        counters: Counters,
        *,
        serving: Callable[[], WeightVersion],
        sampling: Sampling,
        max_staleness: int,
        attempts_per_prompt: int,
        timeout_s: float,
        seed: int,
        keeps: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """serving: weights that the fleet has now. sampling: of one group; its seed is drawn per attempt.

        keeps: False for a group that dynamic sampling drops; another prompt is then asked in its place.
        """
        self._prompts = prompts
        self._prompter = prompter
        self._buffer = buffer
        self._admission = admission
        self._counters = counters
        self._serving = serving
        self._sampling = sampling
        self._max_staleness = max_staleness
        self._attempts_per_prompt = attempts_per_prompt
        self._timeout_s = timeout_s
        self._seed = seed
        self._keeps = keeps
        self._infra_failures = 0  # in a row: paces the producer while the fleet is away
        self._out: dict[str, PromptLease] = {}

    async def run(self) -> None:
        """Produce until cancelled; running groups are then cancelled and their prompts pending again.

        Raises OmnifleetError for what no other prompt would survive (`failures.FATAL`).
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._admission.admit()
                    lease = await self._next_prompt()
                    groups.create_task(self._roll_out(lease), name=f"rollout {lease.prompt_id}")
        except* OmnifleetError as errors:
            raise first_of(errors) from None
        finally:
            for lease in list(
                self._out.values()
            ):  # a task that is cancelled before it began runs no code of its own
                self._give_back(lease, Outcome.INFRA_ERROR, CUT_OFF, self._attempts_per_prompt)

    async def _next_prompt(self) -> PromptLease:
        """A prompt, once there is one: all may be out just now, and one of them may yet come back."""
        try:
            lease = await self._buffer.changed.until(
                lambda: self._prompts.lease(version=self._serving().number, ttl_s=self._timeout_s + _SLACK_S)
            )
        except BaseException:
            self._admission.returned()
            raise
        assert lease is not None
        self._out[lease.attempt] = lease
        return lease

    async def _roll_out(self, lease: PromptLease) -> None:
        try:
            group = await self._attempt(lease)
        except OmnifleetError as error:
            await self._failed(lease, error)
        else:
            self._infra_failures = 0
            if not self._keeps(group):
                self._counters.add("groups_without_signal")
                self._give_back(lease, Outcome.NO_SIGNAL, "all rewards are equal", 1)
                return
            del self._out[lease.attempt]
            self._buffer.put(lease, group)

    def _give_back(self, lease: PromptLease, outcome: Outcome, error: str, limit: int) -> None:
        del self._out[lease.attempt]
        self._buffer.fail(lease, outcome, error, limit=limit)

    async def _attempt(self, lease: PromptLease) -> Group:
        serving = self._serving()
        oldest = WeightVersion(serving.run, serving.lineage, max(serving.number - self._max_staleness, 0))
        identity = Identity(
            serving.run,
            session=lease.attempt,
            prompt_id=lease.prompt_id,
            group_id=lease.attempt,
            attempt=lease.attempt,
        )
        trajectories = await self._prompter.ask(
            self._prompts.row(lease.prompt_id),
            identity=identity,
            sampling=replace(self._sampling, seed=_seed(self._seed, lease)),
            bound=VersionBound(min=oldest),
            lineage=serving.lineage,
        )
        return Group(lease.attempt, lease.prompt_id, trajectories)

    async def _failed(self, lease: PromptLease, error: OmnifleetError) -> None:
        outcome = outcome_of(error)
        self._count(error, outcome)
        pause = self._pause(error, outcome)
        level = logging.WARNING if self._infra_failures < 3 else logging.DEBUG
        log.log(level, "prompt %s, attempt %s: %s: %s", lease.prompt_id, lease.attempt[:8], outcome, error)
        if error.reason in FATAL:
            raise error
        await asyncio.sleep(pause)  # with the credit and the lease in hand: nobody else may hurry in
        self._give_back(lease, outcome, str(error), tries_of(error, self._attempts_per_prompt))

    def _count(self, error: OmnifleetError, outcome: Outcome) -> None:
        self._counters.add(f"attempts_{outcome}")
        if error.reason is Reason.DEADLINE:
            self._counters.add("rollout_timeouts")
        if isinstance(error, RefusedSample):
            self._counters.add(f"refused_{error.check}")

    def _pause(self, error: OmnifleetError, outcome: Outcome) -> float:
        if outcome is not Outcome.INFRA_ERROR:
            return 0.0
        self._infra_failures += 1
        grown = _FIRST_PAUSE_S * 2.0 ** min(self._infra_failures - 1, 8)
        return max(min(grown, _LONGEST_PAUSE_S), error.retry_after_ms / 1000)


def _seed(run_seed: int, lease: PromptLease) -> int:
    """The same prompt gets other samples in another epoch and after a failure of its own."""
    return zlib.crc32(f"{run_seed}/{lease.epoch}/{lease.position}/{lease.failures}".encode())
