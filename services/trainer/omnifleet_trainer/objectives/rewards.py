"""What happens to a reward before its group sees it: scaling, then shaping. Plain floats.

Sources: NeMo RL (scaling, stop-properly factor); DAPO 2503.14476 (soft overlong punishment).
"""

from __future__ import annotations

from omnifleet.config.objective import ObjectiveConfig, OverlongShaping, RewardScaling


def final_reward(reward: float, *, tokens: int, truncated: bool, objective: ObjectiveConfig) -> float:
    """The reward that groups compare. tokens: length of the reply; truncated: cut by the length limit."""
    shaping = objective.reward_shaping
    value = scaled(reward, objective.reward_scaling)
    if truncated and shaping.truncated_factor is not None:
        value *= shaping.truncated_factor
    return value + overlong_penalty(tokens, shaping.overlong)


def scaled(reward: float, scaling: RewardScaling | None) -> float:
    """clamp(r, source_min, source_max), then linearly to [target_min, target_max]; r itself without scaling."""
    if scaling is None:
        return reward
    clamped = min(max(reward, scaling.source_min), scaling.source_max)
    share = (clamped - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def overlong_penalty(tokens: int, shaping: OverlongShaping | None) -> float:
    """0 up to max - buffer, then linearly to -penalty at max and beyond; 0 without shaping."""
    if shaping is None:
        return 0.0
    over = tokens - (shaping.max_tokens - shaping.buffer_tokens)
    return -shaping.penalty * min(max(over / shaping.buffer_tokens, 0.0), 1.0)


def reachable(maximum: float, objective: ObjectiveConfig) -> float:
    """The largest final reward, if the scorers give at most `maximum` and the reply is short and whole."""
    return final_reward(maximum, tokens=0, truncated=False, objective=objective)
