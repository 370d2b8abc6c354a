"""Score held-out rows: one greedy reply each, a few at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Identity, Outcome, Sampling, Trajectory, VersionBound, WeightVersion
from omnifleet_trainer.evaluation.pictures import Pictures, altered
from omnifleet_trainer.loop.failures import FATAL, first_of, outcome_of
from omnifleet_trainer.loop.prompting import Prompter

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

log = logging.getLogger("omnifleet.trainer.evaluation")

_TRIES = 8
_PAUSE_S = 0.5
_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over scored rows. failed: rows without a reward, which count neither way."""

    score: float
    scored: int
    failed: int
    version: WeightVersion
    pictures: Pictures
    seconds: float
    samples: list[dict[str, Any]]


class HeldOut:
    """The held-out set of a run."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        prompter: Prompter,
        *,
        serving: Callable[[], WeightVersion],
        sampling: Sampling,
        at_once: int,
    ) -> None:
        """serving: weights that the fleet has; each reply begins with these or newer. at_once: open requests."""
        self._rows = rows
        self._prompter = prompter
        self._serving = serving
        self._sampling = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None)
        self._at_once = at_once

    async def score(self, step: int, pictures: Pictures = "real") -> Evaluation:
        """Ask all rows. Raises UNAVAILABLE if no row could be scored, and what is fatal for a run."""
        began, version = time.monotonic(), self._serving()
        rows = await asyncio.to_thread(altered, self._rows, pictures)
        gate = asyncio.Semaphore(self._at_once)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(row, step, version, gate)) for row in rows]
        except* OmnifleetError as errors:
            raise first_of(errors) from None
        replies = [(row, task.result()) for row, task in zip(rows, tasks, strict=True)]
        scored = [(row, reply) for row, reply in replies if reply is not None]
        if not scored:
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"none of {len(rows)} held-out rows could be scored", retryable=True
            )
        evaluation = Evaluation(
            score=fmean(reply.reward for _, reply in scored),
            scored=len(scored),
            failed=len(rows) - len(scored),
            version=version,
            pictures=pictures,
            seconds=time.monotonic() - began,
            samples=[_shown(row, reply, step) for row, reply in scored[:_SHOWN]],
        )
        log.info(
            "held-out reward %.3f at step %d (%d rows, %s pictures, %.1f s)",
            evaluation.score,
            step,
            evaluation.scored,
            pictures,
            evaluation.seconds,
        )
        return evaluation

    async def _ask(
        self, row: PromptRow, step: int, version: WeightVersion, gate: asyncio.Semaphore
    ) -> Trajectory | None:
        async with gate:
            for turn in range(_TRIES):
                attempt = f"heldout-{step}-{row.prompt_id}-{turn}"
                identity = Identity(
                    version.run, environment="heldout", prompt_id=row.prompt_id, attempt=attempt
                )
                try:
                    (reply,) = await self._prompter.ask(
                        row,
                        identity=identity,
                        sampling=self._sampling,
                        bound=VersionBound(min=version),
                        lineage=version.lineage,
                    )
                    return reply
                except OmnifleetError as error:
                    if error.reason in FATAL:
                        raise
                    log.warning("held-out row %s: %s", row.prompt_id, error)
                    if outcome_of(error) not in (Outcome.INFRA_ERROR, Outcome.STALE):
                        return None
                    await asyncio.sleep(max(_PAUSE_S * (turn + 1), error.retry_after_ms / 1000))
        return None


def _shown(row: PromptRow, reply: Trajectory, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": row.prompt_id,
        "media": [ref.digest for ref in reply.media],
        "question": row.text,
        "answer": row.answer,
        "reply": reply.text,
        "reward": reply.reward,
    }
