"""Dynamic sampling: groups that would move nothing are dropped before they take a place in a step (DAPO, 2503.14476)."""

from __future__ import annotations

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Group
from omnifleet_trainer.objectives.advantages import rewards_differ


class SignalFilter:
    """Keeps groups whose raw rewards differ. A prompt that was dropped comes back in the next epoch."""

    def __init__(self, *, prompts_per_step: int, limit: int) -> None:
        """limit: steps' worth of groups that may be dropped in a row."""
        self._bound = prompts_per_step * limit
        self._dropped = 0  # in a row

    def __call__(self, group: Group) -> bool:
        """True if the group has a signal. Raises LIMIT_EXCEEDED where the task seems to give none any more."""
        if rewards_differ([trajectory.reward for trajectory in group.trajectories]):
            self._dropped = 0
            return True
        self._dropped += 1
        if self._dropped > self._bound:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"{self._dropped} groups in a row had equal rewards: the task is solved, or out of reach",
                knob="objective.dynamic_sampling_limit, or objective.dynamic_sampling = false",
            )
        return False
