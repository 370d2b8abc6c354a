"""One prompt through the services: place, render, generate, check, score. Used by training and by evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from omnifleet.client.reward import ItemScore, ScoreItem
from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import (
    Generation,
    Identity,
    LogprobsMode,
    MediaRef,
    Sample,
    Sampling,
    Trajectory,
    VersionBound,
)
from omnifleet_trainer.batch.extras import NO_REPLAY, Replay
from omnifleet_trainer.loop.checks import check_generation
from omnifleet_trainer.loop.failures import FATAL, Unscorable
from omnifleet_trainer.rendering import RenderedPrompt, Renderer

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

_SCORE_PAUSE_S = 0.2


class Generating(Protocol):
    """What is asked of the rollout service; `omnifleet.client.rollout.RolloutClient` is one."""

    async def generate(
        self,
        *,
        prompt_token_ids: Sequence[int],
        media: Sequence[MediaRef] = (),
        sampling: Sampling,
        identity: Identity,
        bound: VersionBound = ...,
        logprobs_mode: LogprobsMode | None = None,
        deadline_s: float,
        return_text: bool = False,
        extras: Sequence[str] = (),
    ) -> Generation:
        """All samples of one prompt."""
        ...


class Scoring(Protocol):
    """What is asked of the reward service; `omnifleet.client.reward.RewardClient` is one."""

    async def score(
        self, items: Sequence[ScoreItem], scorers: Sequence[ScorerConfig], deadline_s: float
    ) -> list[ItemScore]:
        """Scores in the order of `items`."""
        ...


class Asker(Protocol):
    """Who brings the scored trajectories of one row: `Prompter` in one turn, `environments.Player` by an episode each."""

    async def ask(
        self, row: PromptRow, *, identity: Identity, sampling: Sampling, bound: VersionBound, lineage: str
    ) -> list[Trajectory]:
        """`sampling.n` scored trajectories, all or none. Raises OmnifleetError; see `failures`."""
        ...


class Prompter:
    """Asks the fleet for replies to one row and gets them scored."""

    def __init__(
        self,
        renderer: Renderer,
        rollout: Generating,
        reward: Scoring,
        *,
        scorers: Sequence[ScorerConfig],
        mode: LogprobsMode,
        timeout_s: float,
        scorers_of: Mapping[str, Sequence[ScorerConfig]] | None = None,
        replay: Replay = NO_REPLAY,
    ) -> None:
        """mode: what the logprobs must mean. timeout_s: longest life of one prompt's rollout, seconds.

        scorers_of: scorers of a task that has its own. replay: what sampled replies must come with; greedy ones train nobody.
        """
        self._renderer = renderer
        self._rollout = rollout
        self._reward = reward
        self._scorers = scorers
        self._scorers_of = dict(scorers_of or {})
        self._mode = mode
        self._timeout_s = timeout_s
        self._replay = replay

    async def ask(
        self, row: PromptRow, *, identity: Identity, sampling: Sampling, bound: VersionBound, lineage: str
    ) -> list[Trajectory]:
        """`sampling.n` scored trajectories, all or none.

        Raises OmnifleetError: what the services raise, RefusedSample, Unscorable, Stale, DEADLINE.
        """
        prompt = await self._render(row)
        replay = self._replay if sampling.temperature > 0 else NO_REPLAY
        try:
            async with asyncio.timeout(self._timeout_s):
                generation = await self._rollout.generate(
                    prompt_token_ids=prompt.token_ids,
                    media=prompt.media,
                    sampling=sampling,
                    identity=identity,
                    bound=bound,
                    logprobs_mode=self._mode,
                    deadline_s=self._timeout_s,
                    return_text=True,
                    extras=replay.names,
                )
        except TimeoutError:
            raise retryable(
                Reason.DEADLINE,
                f"prompt {row.prompt_id!r} was not answered within {self._timeout_s:g} s",
                knob="trainer.rollout_timeout_s",
            ) from None
        except OmnifleetError as error:
            if error.reason is Reason.MEDIA_LOST:
                self._renderer.forget(row)
            raise
        samples = check_generation(
            generation,
            prompt_hash=prompt.prompt_hash,
            mode=self._mode,
            run=identity.run,
            lineage=lineage,
            replay=replay,
        )
        replies = {sample.index: sample.text for sample in samples}
        scores = await self.judge(row, replies, identity=identity, media=prompt.media)
        return [
            _trajectory(row, prompt, generation, sample, score, identity)
            for sample, score in zip(samples, scores, strict=True)
        ]

    async def _render(self, row: PromptRow) -> RenderedPrompt:
        try:
            return await self._renderer.render(row)
        except OmnifleetError as error:
            if error.reason is Reason.MEDIA_LOST:
                self._renderer.forget(row)
            if error.reason is Reason.DEADLINE:  # the media service was slow, not this prompt
                raise retryable(Reason.UNAVAILABLE, error.message, knob=error.knob) from error
            raise

    async def judge(
        self, row: PromptRow, replies: Mapping[int, str], *, identity: Identity, media: Sequence[MediaRef]
    ) -> list[ItemScore]:
        """A score for each reply, by the scorers of the row's task. replies: sample -> text.

        Raises Unscorable, and what the reward service raises.
        """
        items = [
            ScoreItem(
                id=f"{identity.attempt}/{index}",
                response=text,
                ground_truth=row.answer,
                identity=identity,
                prompt=row.text,
                media=tuple(media),
                extra=extra_of(row),
                prompt_suffix=self._renderer.opened,
            )
            for index, text in replies.items()
        ]
        scores = await self._score_patiently(items, self._scorers_of.get(row.task, self._scorers))
        for score in scores:
            if score.error is not None:
                if score.error.reason is Reason.UNAVAILABLE or score.error.reason in FATAL:
                    raise score.error  # a judge that is away, refuses, or may cost no more: no fault of this reply
                raise Unscorable(
                    score.error.reason, f"{score.id}: {score.error.message}", knob=score.error.knob
                )
            if not math.isfinite(score.score):
                raise Unscorable(
                    Reason.INTERNAL, f"{score.id}: the score {score.score} is not a finite number"
                )
        return scores

    async def _score_patiently(
        self, items: Sequence[ScoreItem], scorers: Sequence[ScorerConfig]
    ) -> list[ItemScore]:
        """Generated tokens are dear: wait for a reward service that restarts, up to the rollout's time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout_s
        while True:
            try:
                return await self._reward.score(items, scorers, max(end - loop.time(), 0.1))
            except OmnifleetError as error:
                pause = max(_SCORE_PAUSE_S, error.retry_after_ms / 1000)
                if not error.retryable:
                    raise
                if loop.time() + pause >= end:
                    raise retryable(
                        Reason.UNAVAILABLE, f"no scores: {error.message}", knob=error.knob
                    ) from error
            await asyncio.sleep(pause)


def extra_of(row: PromptRow) -> dict[str, Any]:
    """What scorers may want to know of a row beside its text and answer."""
    return {**row.extra, "task": row.task}


def _trajectory(
    row: PromptRow,
    prompt: RenderedPrompt,
    generation: Generation,
    sample: Sample,
    score: ItemScore,
    identity: Identity,
) -> Trajectory:
    return Trajectory(
        id=score.id,
        identity=Identity(
            identity.run,
            environment=identity.environment,
            prompt_id=identity.prompt_id,
            group_id=identity.group_id,
            sample=sample.index,
            attempt=identity.attempt,
        ),
        # Equal to what the engine echoes: their hashes were compared.
        prompt_token_ids=prompt.expanded,
        prompt_hash=generation.prompt_hash,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        spans=sample.spans,
        logprobs_mode=generation.logprobs_mode,
        finish_reason=sample.finish_reason,
        text=sample.text,
        media=prompt.media,
        reward=score.score,
        reward_version=score.reward_version,
        components=score.components,
        prompt=row.text,
        ground_truth=row.answer,
        prompt_suffix=prompt.opened,
        extra=extra_of(row),
        routed_experts=sample.routed_experts,
        sampling_mask=sample.sampling_mask,
    )
