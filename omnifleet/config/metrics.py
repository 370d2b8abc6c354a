"""Where the metrics of a run go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from omnifleet.config.base import StrictModel

SinkName = Literal["prometheus", "tensorboard", "wandb", "mlflow"]


class MetricsConfig(StrictModel):
    """Sinks beside `metrics.jsonl`, which every run writes."""

    sinks: tuple[SinkName, ...] = ("prometheus",)
    """Libraries that get each step's record; all but prometheus need the extra of their name (omnifleet-trainer[wandb])."""
    project: str = Field("omnifleet", min_length=1)
    """W&B project and MLflow experiment."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """Send to W&B at once, or keep files in the run's folder for `wandb sync`."""
    mlflow_uri: str | None = None
    """MLflow tracking server; default: `mlflow.db` in the run's folder."""

    @field_validator("sinks")
    @classmethod
    def _once(cls, sinks: tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        if len(set(sinks)) < len(sinks):
            raise ValueError(f"a sink is named twice: {', '.join(sinks)}")
        return sinks
