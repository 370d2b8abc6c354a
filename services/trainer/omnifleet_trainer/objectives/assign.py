"""Rewards of a whole step to advantages: scale and shape, subtract the KL, compare within groups, whiten, clamp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.advantages import group_advantages
from omnifleet_trainer.objectives.rewards import final_reward
from omnifleet_trainer.objectives.whitening import whitened


@dataclass(frozen=True, slots=True)
class Scored:
    """What the advantage of one sample depends on.

    group: id of its prompt occurrence, never its tokens. reward: of the scorers. tokens: length of the reply.
    trained: how many of them train. truncated: cut by the length limit. valid: False if no loss will see it.
    kl: Σ_t k_t to the reference policy where it belongs to the reward, else 0.
    """

    group: str
    reward: float
    tokens: int
    trained: int
    truncated: bool = False
    valid: bool = True
    kl: float = 0.0


def step_advantages(samples: Sequence[Scored], objective: ObjectiveConfig) -> list[float]:
    """One advantage a sample, in their order. Samples of a group need not be neighbours.

    r' = shape(scale(r)) - β·kl; then `group_advantages` in each group; then whitening over the step and the clamp, if
    they are on. A sample that no loss sees gets 0 and enters no baseline (unless masked_in_baseline), no mean.
    """
    valid = [s.valid and not (s.truncated and objective.overlong_filtering) for s in samples]
    rewards = [_reward(s, objective) for s in samples]
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    advantages = [0.0] * len(samples)
    for members in groups.values():
        values = group_advantages(
            [rewards[i] for i in members],
            [valid[i] for i in members],
            objective.baseline,
            objective.std,
            parity=objective.masked_in_baseline,
        )
        for i, value in zip(members, values, strict=True):
            advantages[i] = value
    if objective.whitening:
        trained = [s.trained if ok else 0 for s, ok in zip(samples, valid, strict=True)]
        advantages = whitened(advantages, trained)
    clip = objective.advantage_clip
    return advantages if clip is None else [max(-clip, min(clip, a)) for a in advantages]


def _reward(sample: Scored, objective: ObjectiveConfig) -> float:
    shaped = final_reward(
        sample.reward, tokens=sample.tokens, truncated=sample.truncated, objective=objective
    )
    return shaped - objective.kl_coefficient * sample.kl
