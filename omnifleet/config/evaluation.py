"""Evaluation of a recipe: what is scored besides what is trained."""

from __future__ import annotations

from pydantic import Field, model_validator

from omnifleet.config.base import StrictModel


class EvaluationConfig(StrictModel):
    """Held-out score: greedy replies through the same services."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = at start and end only."""
    size: int = Field(128, ge=1)
    """Held-out prompts."""
    controls: bool = False
    """At the end also score without pictures and with shuffled pictures."""
    generations: int = Field(1, ge=1)
    """Replies to a held-out prompt: 1 is greedy, more are sampled as in training and their rewards averaged."""
    pass_at: tuple[int, ...] = ()
    """k of pass@k, at most `generations` each: chance that the best of k replies earns `pass_reward`."""
    pass_reward: float = 1.0
    """Reward from which a reply counts as passed."""
    other_tasks: bool = False
    """Held-out rows may be of tasks that are not trained."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many evaluations in a row that did not beat the best one by `min_gain`."""
    min_gain: float = Field(0.0, ge=0)
    """Gain in held-out reward that counts."""

    @model_validator(mode="after")
    def _k_is_drawn(self) -> EvaluationConfig:
        if any(not 1 <= k <= self.generations for k in self.pass_at):
            raise ValueError(
                f"pass_at {list(self.pass_at)} needs 1 <= k <= evaluation.generations = {self.generations}"
            )
        if self.patience is not None and self.every == 0:
            raise ValueError("evaluation.patience needs evaluation.every > 0: nothing would be compared")
        return self
