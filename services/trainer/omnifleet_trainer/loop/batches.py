"""Ready groups to the batch of a step: advantages within each group, every media segment once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnifleet.address import token_digest
from omnifleet.config.objective import ObjectiveConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, FinishReason, Group, Trajectory
from omnifleet_trainer.batch.extras import NO_REPLAY, Replay, read_experts, read_kept
from omnifleet_trainer.batch.samples import Segment, StepBatch, TrainingSample
from omnifleet_trainer.batch.scored import scored
from omnifleet_trainer.loop.prompts import Prompts
from omnifleet_trainer.objectives.assign import step_advantages
from omnifleet_trainer.objectives.messages import fault_of, penalty_of
from omnifleet_trainer.rendering import RenderedPrompt, Renderer

log = logging.getLogger("omnifleet.trainer.batches")


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """How rewards of a step become advantages; see `ObjectiveConfig`."""

    objective: ObjectiveConfig

    def __call__(self, samples: Sequence[TrainingSample]) -> list[float]:
        """One advantage a sample. A sample that no loss sees enters no baseline."""
        return step_advantages([scored(sample) for sample in samples], self.objective)

    def penalties(self, text: str, tokens: int, *, opened: str) -> tuple[tuple[int, int, float], ...]:
        """What a fault in a reply costs its tokens; see `TrainingSample.penalties`. opened: end of the rendered prompt."""
        penalty = penalty_of(fault_of(text, opened="<think>" in opened), self.objective.penalties)
        return () if penalty is None else ((0, tokens, penalty),)


class Batches:
    """Builds batches for weights of a known version."""

    def __init__(
        self,
        prompts: Prompts,
        renderer: Renderer,
        advantages: AdvantageRule,
        replay: Replay = NO_REPLAY,
    ) -> None:
        """replay: what samples must come with; one without (of a ledger from before the recipe asked) does not train."""
        self._prompts, self._replay = prompts, replay
        self._renderer = renderer
        self._advantages = advantages

    async def build(self, groups: Sequence[Group], *, step: int, version: int) -> StepBatch:
        """All samples, group after group. `version`: weights that this step trains; lags are counted from it.

        Raises what the media service raises; pictures that it lost are put again.
        """
        samples: list[TrainingSample] = []
        segments: dict[Digest, Segment] = {}
        for group in groups:
            for trajectory, prompt in await self._prompts_of(group):
                tensors: Mapping[Digest, Segment] = {s.key: s.tensors for s in prompt.segments}
                segments.update(tensors)
                samples.append(self._sample(trajectory, group.id, prompt, version))
        for sample, advantage in zip(samples, self._advantages(samples), strict=True):
            sample.advantage = advantage
        return StepBatch(samples, step, segments)

    async def _prompts_of(self, group: Group) -> list[tuple[Trajectory, RenderedPrompt]]:
        """Each trajectory with its prompt: rendered here, or of an environment's episode what the engine saw."""
        if any(trajectory.mask for trajectory in group.trajectories):
            return [(trajectory, await self._seen(trajectory)) for trajectory in group.trajectories]
        prompt = await self._render(group.prompt_id)
        return [(trajectory, prompt) for trajectory in group.trajectories]

    async def _seen(self, trajectory: Trajectory) -> RenderedPrompt:
        return RenderedPrompt(
            token_ids=[],
            expanded=trajectory.prompt_token_ids,
            prompt_hash=token_digest(trajectory.prompt_token_ids),
            media=trajectory.media,
            segments=await self._renderer.segments(trajectory.media),
            opened=self._renderer.opened,
        )

    async def _render(self, prompt_id: str) -> RenderedPrompt:
        row = self._prompts.row(prompt_id)
        try:
            return await self._renderer.render(row)
        except OmnifleetError as error:
            if error.reason not in (Reason.MEDIA_LOST, Reason.NOT_FOUND):
                raise
            log.warning("prompt %s: %s; putting its pictures again", prompt_id, error)
            self._renderer.forget(row)
            return await self._renderer.render(row)

    def _sample(
        self, trajectory: Trajectory, group_id: str, prompt: RenderedPrompt, version: int
    ) -> TrainingSample:
        experts, masks = trajectory.routed_experts, trajectory.sampling_mask
        lacks = (self._replay.experts and not experts) or (self._replay.kept_ids and not masks)
        length = len(prompt.expanded) + len(trajectory.token_ids)
        return TrainingSample(
            trajectory_id=trajectory.id,
            group_id=group_id,
            prompt_token_ids=prompt.expanded,
            prompt_hash=trajectory.prompt_hash,
            token_ids=trajectory.token_ids,
            generation_logprobs=trajectory.logprobs,
            mask=trajectory.mask or [1] * len(trajectory.token_ids),
            lag=token_lags(trajectory, version),
            reward=trajectory.reward,
            media=prompt.media,
            segment_keys=tuple(segment.key for segment in prompt.segments),
            truncated=_truncated(trajectory),
            penalties=self._advantages.penalties(
                trajectory.text, len(trajectory.token_ids), opened=prompt.opened
            ),
            valid=not lacks,
            experts=read_experts(experts, length) if self._replay.experts and experts else None,
            kept_ids=read_kept(masks, trajectory.token_ids) if self._replay.kept_ids and masks else None,
        ).trimmed()


def _truncated(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason is FinishReason.LENGTH


def token_lags(trajectory: Trajectory, version: int) -> list[int]:
    """Steps between the weights that made each token and `version`."""
    return [version - span.version.number for span in trajectory.spans for _ in range(span.start, span.end)]
