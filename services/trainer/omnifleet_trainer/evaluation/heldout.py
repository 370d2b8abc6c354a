"""Score held-out rows: one greedy reply each, or several sampled ones, a few rows at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Identity, Outcome, Sampling, Trajectory, VersionBound, WeightVersion
from omnifleet_trainer.evaluation.pictures import Pictures, altered
from omnifleet_trainer.loop.failures import FATAL, first_of, outcome_of
from omnifleet_trainer.loop.prompting import Asker

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

log = logging.getLogger("omnifleet.trainer.evaluation")

_TRIES = 8
_PAUSE_S = 0.5
_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over scored rows. failed: rows without a reward, which count neither way.

    passed: k -> pass@k over the scored rows.
    """

    score: float
    scored: int
    failed: int
    version: WeightVersion
    pictures: Pictures
    seconds: float
    samples: list[dict[str, Any]]
    passed: dict[int, float] = field(default_factory=dict)


class HeldOut:
    """The held-out set of a run."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        prompter: Asker,
        *,
        serving: Callable[[], WeightVersion],
        sampling: Sampling,
        at_once: int,
        generations: int = 1,
        pass_at: Sequence[int] = (),
        pass_reward: float = 1.0,
    ) -> None:
        """serving: weights that the fleet has; each reply begins with these or newer. at_once: open requests.

        generations: replies to a row; 1 is greedy, more are drawn by `sampling`. pass_at: k of pass@k; a reply passes
        with a reward of at least `pass_reward`.
        """
        self._rows = rows
        self._prompter = prompter
        self._serving = serving
        greedy = replace(sampling, n=1, temperature=0.0, top_p=1.0, top_k=-1, seed=None)
        self._sampling = greedy if generations == 1 else replace(sampling, n=generations, seed=None)
        self._pass_at, self._pass_reward = tuple(pass_at), pass_reward
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
        answered = [(row, task.result()) for row, task in zip(rows, tasks, strict=True)]
        scored = [(row, replies) for row, replies in answered if replies]
        if not scored:
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"none of {len(rows)} held-out rows could be scored", retryable=True
            )
        evaluation = Evaluation(
            score=fmean(reply.reward for _, replies in scored for reply in replies),
            scored=len(scored),
            failed=len(rows) - len(scored),
            version=version,
            pictures=pictures,
            seconds=time.monotonic() - began,
            samples=[_shown(row, replies[0], step) for row, replies in scored[:_SHOWN]],
            passed={k: fmean(self._pass_rate(replies, k) for _, replies in scored) for k in self._pass_at},
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

    def _pass_rate(self, replies: Sequence[Trajectory], k: int) -> float:
        return pass_at_k(len(replies), sum(reply.reward >= self._pass_reward for reply in replies), k)

    async def _ask(
        self, row: PromptRow, step: int, version: WeightVersion, gate: asyncio.Semaphore
    ) -> list[Trajectory]:
        """Replies to a row; none if it has no reward."""
        async with gate:
            for turn in range(_TRIES):
                attempt = f"heldout-{step}-{row.prompt_id}-{turn}"
                identity = Identity(
                    version.run, environment="heldout", prompt_id=row.prompt_id, attempt=attempt
                )
                try:
                    return await self._prompter.ask(
                        row,
                        identity=identity,
                        sampling=self._sampling,
                        bound=VersionBound(min=version),
                        lineage=version.lineage,
                    )
                except OmnifleetError as error:
                    if error.reason in FATAL:
                        raise
                    log.warning("held-out row %s: %s", row.prompt_id, error)
                    if outcome_of(error) not in (Outcome.INFRA_ERROR, Outcome.STALE):
                        return []
                    await asyncio.sleep(max(_PAUSE_S * (turn + 1), error.retry_after_ms / 1000))
        return []


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased chance that the best of k replies passes, from `passed` of n: 1 - C(n - passed, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} replies, there are {n}")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


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
