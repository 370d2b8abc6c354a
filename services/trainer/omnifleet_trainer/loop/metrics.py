"""What a step says about its samples and its time. The policy adds what it alone knows (TMPE, KL, ratios, gradients).

Names are those of NeMo RL where it has the metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from omnifleet.types import Group
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample

_ALIASES = {"token_mult_prob_error": "tmpe"}
_IDLE = {
    "wait_s": "idle/buffer_starvation_s",
    "prepare_s": "idle/prepare_s",
    "refit_s": "idle/refit_bubble_s",
    "turn_s": "idle/turn_s",
}


def sample_metrics(batch: StepBatch, groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, signal, lag and lengths of one step.

    lag: of tokens, in steps; lag/K is the share of tokens that lag K; avg_trajectory_age: mean lag of the samples'
    oldest tokens; mixed_version_share: tokens in replies that more than one version wrote. zero_signal_groups: all
    advantages 0. baseline_reward/pct_*: share of groups whose mean reward is 0, 1, or between. reward/NAME: mean of one
    component. truncation_rate: share of replies cut by the length limit. pictures: distinct ones. replayed/*: share of
    samples that come with the engine's routed experts, and with its sampling masks.
    """
    samples = batch.samples
    rewards = [sample.reward for sample in samples]
    advantages = [sample.advantage for sample in samples]
    by_group = _by_group(samples)
    truncated = fmean(sample.truncated for sample in samples)
    return {
        "reward": fmean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "advantages/mean": fmean(advantages),
        "advantages/min": min(advantages),
        "advantages/max": max(advantages),
        "groups": float(len(by_group)),
        "samples": float(len(samples)),
        "zero_signal_groups": float(sum(not any(s.advantage for s in group) for group in by_group)),
        "truncation_rate": truncated,
        "natural_termination_rate": 1 - truncated,
        "pictures": float(len(batch.segments)),
        "replayed/experts": fmean(sample.experts is not None for sample in samples),
        "replayed/sampling_masks": fmean(sample.kept_ids is not None for sample in samples),
        **_baselines(by_group),
        **_lengths(samples),
        **_component_means(groups),
        **_lags(samples),
    }


def time_metrics(step: Mapping[str, float]) -> dict[str, float]:
    """From the seconds of a step's activities: idle/CAUSE_s, in which the policy did not train, and efficiency_pct.

    efficiency_pct: percent of the step in which it did. buffer_size: groups that were ready when the step began.
    """
    metrics = {name: step[source] for source, name in _IDLE.items() if source in step}
    if step.get("step_s", 0.0) > 0:
        metrics["efficiency_pct"] = 100 * step.get("train_s", 0.0) / step["step_s"]
    if "groups_ready" in step:
        metrics["buffer_size"] = step["groups_ready"]
    return metrics


def with_aliases(metrics: dict[str, float]) -> dict[str, float]:
    """The policy's metrics, the best known also by their short names."""
    return metrics | {short: metrics[long] for long, short in _ALIASES.items() if long in metrics}


def _by_group(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _baselines(groups: Sequence[Sequence[TrainingSample]]) -> dict[str, float]:
    means = [fmean(sample.reward for sample in group) for group in groups]
    none, all_ = means.count(0.0) / len(means), means.count(1.0) / len(means)
    return {
        "baseline_reward/pct_0": none,
        "baseline_reward/pct_1": all_,
        "baseline_reward/pct_mixed": 1 - none - all_,
    }


def _lengths(samples: Sequence[TrainingSample]) -> dict[str, float]:
    replies = [len(sample.token_ids) for sample in samples]
    p50, p95 = np.quantile(replies, [0.5, 0.95])
    return {
        "response_tokens": float(sum(replies)),
        "response_tokens_mean": fmean(replies),
        "response_tokens_p50": float(p50),
        "response_tokens_p95": float(p95),
        "response_tokens_max": float(max(replies)),
        "mean_prompt_length": fmean(len(sample.prompt_token_ids) for sample in samples),
        "total_num_tokens": float(sum(sample.length for sample in samples)),
    }


def _component_means(groups: Sequence[Group]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.components.items():
                values.setdefault(f"reward/{name}", []).append(value)
    return {name: fmean(scores) for name, scores in values.items()}


def _lags(samples: Sequence[TrainingSample]) -> dict[str, float]:
    lags = [lag for sample in samples for lag in sample.lag]
    if not lags:
        return {}
    shares = {f"lag/{lag}": count / len(lags) for lag, count in sorted(Counter(lags).items())}
    mixed = sum(len(sample.lag) for sample in samples if len(set(sample.lag)) > 1)
    return {
        "lag_mean": fmean(lags),
        "lag_max": float(max(lags)),
        "avg_trajectory_age": fmean(max(sample.lag, default=0) for sample in samples),
        "mixed_version_share": mixed / len(lags),
        **shares,
    }
