"""What a step says about its samples. The policy adds what it alone knows (TMPE, KL, ratios, entropy, gradients)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from omnifleet.types import Group
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample

_ALIASES = {"token_mult_prob_error": "tmpe"}


def sample_metrics(batch: StepBatch, groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, signal, lag and lengths of one step.

    lag: of tokens, in steps; lag/K is the share of tokens that lag K. zero_signal_groups: all advantages 0.
    reward/NAME: mean of one component of the reward. truncation_rate: share of replies cut by the length limit.
    """
    samples = batch.samples
    rewards = [sample.reward for sample in samples]
    replies = [len(sample.token_ids) for sample in samples]
    prompts = [len(sample.prompt_token_ids) for sample in samples]
    by_group = _by_group(samples)
    return {
        "reward": fmean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "advantage_mean": fmean(sample.advantage for sample in samples),
        "advantage_min": min(sample.advantage for sample in samples),
        "advantage_max": max(sample.advantage for sample in samples),
        "groups": float(len(by_group)),
        "samples": float(len(samples)),
        "zero_signal_groups": float(sum(not any(s.advantage for s in group) for group in by_group.values())),
        "response_tokens_mean": fmean(replies),
        "response_tokens_max": float(max(replies)),
        "response_tokens": float(sum(replies)),
        "prompt_tokens_mean": fmean(prompts),
        "truncation_rate": fmean(sample.truncated for sample in samples),
        "pictures": float(len(batch.segments)),
        **_component_means(groups),
        **_lags([lag for sample in samples for lag in sample.lag]),
    }


def with_aliases(metrics: dict[str, float]) -> dict[str, float]:
    """The policy's metrics, the best known also by their short names."""
    return metrics | {short: metrics[long] for long, short in _ALIASES.items() if long in metrics}


def _by_group(samples: Sequence[TrainingSample]) -> dict[str, list[TrainingSample]]:
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _component_means(groups: Sequence[Group]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.components.items():
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: fmean(scores) for name, scores in values.items()}


def _lags(lags: Sequence[int]) -> dict[str, float]:
    shares = {f"lag/{lag}": count / len(lags) for lag, count in sorted(Counter(lags).items())}
    return {"lag_mean": fmean(lags), "lag_max": float(max(lags)), **shares}
